#!/bin/bash
# Prolog= of slurm.conf, with PrologFlags=Alloc: tells the agent of the job, and keeps it off a node that is unfit.
# It fails open: anything but a CRITICAL of `fleetpulse check` lets the job start. See docs/install.md.
. "$(dirname -- "$0")/hooks.sh" || exit 0
keep_facts
unfit || exit 0
[ "$DRAIN" = yes ] || { drain; exit 0; }
forget_facts
drain
exit 1
