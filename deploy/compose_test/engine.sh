# Sourced by run: a Docker Engine with Compose 2. One that runs already is used as it is; else our own is started.
#
# Our own lives in a network namespace, so that none of its bridges and rules reaches the host, and ends with the test.
# Nothing in it reaches a registry: images.sh brings every image that is needed.

NAMESPACE=fleetpulse-compose-$$
OWN_ENGINE=""

say() { echo "compose-test: $*" >&2; }

# Runs a command where the published ports are.
inside() {
    if [ -n "$OWN_ENGINE" ]; then nsenter --net="/run/netns/$NAMESPACE" "$@"; else "$@"; fi
}

engine_up() {
    compose_plugin
    if docker info >/dev/null 2>&1; then
        say "using the Docker Engine that runs here"
        return
    fi
    [ "$(id -u)" -eq 0 ] || { say "no Docker Engine answers, and starting one needs root"; return 1; }
    engine_install
    say "starting a Docker Engine of our own in namespace $NAMESPACE"
    OWN_ENGINE=$WORK/engine
    mkdir -p "$OWN_ENGINE"
    ip netns add "$NAMESPACE"
    ip -n "$NAMESPACE" link set lo up
    export DOCKER_HOST=unix://$OWN_ENGINE/docker.sock
    # setsid, because a Ctrl-C that ends the checks must leave them an engine to clean up;
    # nsenter, because "ip netns exec" mounts /sys anew and hides the cgroups from the engine;
    # nofile, because a root without CAP_SYS_RESOURCE cannot raise that limit, as the engine would by default.
    inside setsid dockerd --host "$DOCKER_HOST" --data-root "$OWN_ENGINE/data" --exec-root "$OWN_ENGINE/exec" \
        --pidfile "$OWN_ENGINE/docker.pid" --default-ulimit nofile=1024:1024 >"$OWN_ENGINE/log" 2>&1 &
    for _ in $(seq 150); do
        docker info >/dev/null 2>&1 && return
        sleep 0.2
    done
    tail -5 "$OWN_ENGINE/log" >&2
    say "our Docker Engine did not start within 30 s"
    return 1
}

engine_down() {
    [ -n "$OWN_ENGINE" ] || return 0
    local pid
    if pid=$(cat "$OWN_ENGINE/docker.pid" 2>/dev/null); then
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 200); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
    fi
    # The engine may leave mounts of containers and of its namespaces behind; a mount hides what is to be removed.
    awk -v below="$OWN_ENGINE/" 'index($2, below) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r umount -l || true
    ip netns delete "$NAMESPACE" 2>/dev/null || true
    say "our Docker Engine has ended"
}

engine_install() {
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v iptables >/dev/null || missing+=(iptables)
    command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
    [ ${#missing[@]} -eq 0 ] && return
    command -v apt-get >/dev/null || { say "missing: ${missing[*]}; install them with your own package manager"; return 1; }
    say "installing ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

# Debian 12 packages Compose 1 only. The plugin of Debian 13 runs on it; it is unpacked beside our caches, not installed.
compose_plugin() {
    docker compose version >/dev/null 2>&1 && return
    command -v docker >/dev/null || engine_install
    export DOCKER_CONFIG=$CACHE/docker
    docker compose version >/dev/null 2>&1 && return
    command -v apt-get >/dev/null || { say "docker compose is missing: https://docs.docker.com/compose/install/"; return 1; }
    say "fetching the Compose plugin of Debian 13"
    local apt=$WORK/apt
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$DOCKER_CONFIG/cli-plugins"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" >"$apt/list"
    local settings=(-o Dir::Etc::SourceList="$apt/list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$apt/lists"
        -o Dir::Cache="$apt" -o Acquire::Languages=none -o APT::Sandbox::User=root)
    apt-get -qq "${settings[@]}" update
    (cd "$apt" && apt-get -qq "${settings[@]}" download docker-compose)
    dpkg-deb --extract "$apt"/docker-compose_*.deb "$apt/unpacked"
    install "$(find "$apt/unpacked" -name docker-compose -type f -size +1M)" "$DOCKER_CONFIG/cli-plugins/docker-compose"
    docker compose version >/dev/null
}
