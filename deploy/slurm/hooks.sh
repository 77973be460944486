# Sourced by prolog.sh, epilog.sh and health_check.sh: their settings, and questions that end in time whatever hangs.
#
# /etc/fleetpulse/hooks.conf, if there is one, is read as shell and may set the variables below.

# Slurm gives its hooks no search path.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
FLEETPULSE=/opt/fleetpulse/bin/fleetpulse
CONFIG=/etc/fleetpulse/fleetpulse.toml
TIMEOUT=5     # whole seconds that the check may take; a hook takes at most one more
DRAIN=yes     # no: only say in the log what would have been drained
SCONTROL=scontrol
JOBS=${FLEETPULSE_JOBS_DIR:-/run/fleetpulse/jobs} # where the agent looks for the jobs of its node
NODE=${SLURMD_NODENAME:-${HOSTNAME%%.*}}
conf=${FLEETPULSE_HOOKS_CONF:-/etc/fleetpulse/hooks.conf}
# shellcheck source=/dev/null
[ ! -r "$conf" ] || . "$conf"
case $TIMEOUT in '' | *[!0-9]* | 0) TIMEOUT=5 ;; esac

FACTS=(SLURM_JOB_ID SLURM_JOB_UID SLURM_JOB_USER SLURM_JOB_NAME SLURM_JOB_PARTITION SLURM_JOB_ACCOUNT SLURM_JOB_GPUS
    SLURM_JOB_NODELIST SLURM_CLUSTER_NAME SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_HET_JOB_ID SLURMD_NODENAME)
LONGEST=4096 # characters of a fact; what is longer is left out, so that a file stays below the agent's 16 KiB

began=${EPOCHREALTIME/[.,]/}

say() { logger --tag fleetpulse -- "$*" 2>/dev/null || true; }

# left S: seconds of the first S that are not over, at least a tenth
left() {
    local us=$(($1 * 1000000 - (${EPOCHREALTIME/[.,]/} - began)))
    [ "$us" -gt 100000 ] || us=100000
    printf '%d.%06d' $((us / 1000000)) $((us % 1000000))
}

# asked S COMMAND...: the first line that it prints, in $line; fails where none came within the first S seconds.
# It is not waited for: `timeout` would wait for a process that hangs in the kernel, and so would we. It holds nothing of
# ours open: slurmd reads what a hook prints to the end of all who could print.
asked() {
    local limit=$1 answer child rc=0
    shift
    line=
    exec {answer}< <(exec </dev/null 2>/dev/null; exec "$@")
    child=$!
    IFS= read -r -t "$(left "$limit")" line <&"$answer" || rc=$?
    exec {answer}<&-
    kill -KILL "$child" 2>/dev/null
    return "$rc"
}

# Whether this node is certainly unfit. $reason says why. No answer, or any other, is no.
unfit() {
    asked "$TIMEOUT" "$FLEETPULSE" check --nagios --timeout "${TIMEOUT}s" --config "$CONFIG" || return 1
    reason=${line%% | *}
    [[ $line == "CRITICAL - "* ]]
}

drained() { asked "$TIMEOUT" "$SCONTROL" --oneliner show node "$NODE" && [[ $line =~ State=[^\ ]*DRAIN ]]; }

# Drains with our reason before Slurm does with its own. A node that somebody drained keeps that reason.
drain() {
    local text="fleetpulse: ${reason#CRITICAL - }"
    say "$NODE is unfit: $text"
    [ "$DRAIN" = yes ] || return 0
    drained || asked $((TIMEOUT + 1)) "$SCONTROL" update "NodeName=$NODE" State=DRAIN "Reason=${text:0:250}"
    return 0
}

is_job() { case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) return 1 ;; esac; }

# What the agent's collector of jobs wants to know; only these names, never the job's own environment.
keep_facts() {
    is_job || return 0
    local name value new="$JOBS/$SLURM_JOB_ID.env.tmp.$$"
    umask 022
    mkdir -p "$JOBS" 2>/dev/null || return 0
    for name in "${FACTS[@]}"; do
        value=${!name:-}
        case $value in '' | *[$'\n\r']*) continue ;; esac
        [ ${#value} -gt "$LONGEST" ] || printf '%s=%s\n' "$name" "$value"
    done >"$new" 2>/dev/null && mv -f "$new" "$JOBS/$SLURM_JOB_ID.env" 2>/dev/null
    return 0
}

forget_facts() { if is_job; then rm -f "$JOBS/$SLURM_JOB_ID.env" 2>/dev/null; fi; return 0; }
