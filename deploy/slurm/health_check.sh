#!/bin/bash
# HealthCheckProgram= of slurm.conf: drains a node that became unfit, also one that runs a job (it may go on). Never fails.
# A node is given back by a person: scontrol update NodeName=NODE State=RESUME
. "$(dirname -- "$0")/hooks.sh" || exit 0
unfit && drain
exit 0
