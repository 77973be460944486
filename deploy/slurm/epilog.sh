#!/bin/bash
# Epilog= of slurm.conf: the agent needs the job's facts no longer. Never fails.
here=$(dirname -- "$(readlink -f -- "$0")") # slurm.conf may name a link to it
if [ ! -r "$here/hooks.sh" ]; then
    echo "$0: no $here/hooks.sh: this hook does nothing" >&2
    logger --tag fleetpulse -- "$0: no $here/hooks.sh: this hook does nothing" 2>/dev/null
    exit 0
fi
. "$here/hooks.sh" || exit 0
forget_facts
exit 0
