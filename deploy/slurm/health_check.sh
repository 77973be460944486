#!/bin/bash
# HealthCheckProgram= of slurm.conf: drains a node that became unfit, also one that runs a job (it may go on). Never fails.
# A node is given back by a person: scontrol update NodeName=NODE State=RESUME
here=$(dirname -- "$(readlink -f -- "$0")") # slurm.conf may name a link to it
if [ ! -r "$here/hooks.sh" ]; then
    echo "$0: no $here/hooks.sh: this hook does nothing" >&2
    logger --tag fleetpulse -- "$0: no $here/hooks.sh: this hook does nothing" 2>/dev/null
    exit 0
fi
. "$here/hooks.sh" || exit 0
unfit && drain
exit 0
