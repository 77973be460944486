#!/bin/bash
# Prolog= of slurm.conf, with PrologFlags=Alloc: tells the agent of the job, and keeps it off a node that is unfit.
# It fails open: anything but a CRITICAL of `fleetpulse check` lets the job start. See guide install.md.
here=$(dirname -- "$(readlink -f -- "$0")") # slurm.conf may name a link to it
if [ ! -r "$here/hooks.sh" ]; then
    echo "$0: no $here/hooks.sh: this hook does nothing" >&2
    logger --tag fleetpulse -- "$0: no $here/hooks.sh: this hook does nothing" 2>/dev/null
    exit 0
fi
. "$here/hooks.sh" || exit 0
keep_facts
unfit || exit 0
[ "$DRAIN" = yes ] || { drain; exit 0; }
forget_facts
drain
exit 1
