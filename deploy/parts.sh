#!/usr/bin/env bash
# Installs the real parts that tests run against, each only if it is missing:
#   chromium   a headless browser with a font, for the dashboard
#   kafka      Java 17 or newer, Maven and openssl, then the jars of a real Apache Kafka
# Debian or Ubuntu, as root; without root it says what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"

have() { command -v "$1" >/dev/null; }

get() { # get WHAT PACKAGE...
    local what="$1"
    shift
    if ! have apt-get; then
        echo "parts: $what is missing and there is no apt-get; install it with your own package manager" >&2
        exit 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        echo "parts: $what is missing and installing it needs root: sudo make parts" >&2
        exit 1
    fi
    echo "parts: installing $what" >&2
    fresh_index
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

INDEX_IS_FRESH=
fresh_index() {
    [ -n "$INDEX_IS_FRESH" ] || apt-get update -qq
    INDEX_IS_FRESH=yes
}

have_browser() { have chromium || have chromium-browser || have google-chrome; }
have_fonts() { have fc-list && [ -n "$(fc-list | head -1)" ]; }

part_chromium() {
    have_browser || get Chromium chromium
    have_fonts || get "a font" fontconfig fonts-dejavu-core
    echo "parts: Chromium and fonts are there"
}

have_java() {
    local version
    have java || return 1
    version="$(java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -1)"
    [ "${version:-0}" -ge 17 ]
}

java_package() { # the oldest that is new enough: Debian 12 has 17, Debian 13 and Ubuntu 24.04 have 21
    local version
    for version in 17 21 25; do
        if [ -n "$(apt-cache madison "openjdk-$version-jre-headless" 2>/dev/null)" ]; then
            echo "openjdk-$version-jre-headless"
            return
        fi
    done
    echo default-jre-headless
}

part_kafka() {
    if ! have_java; then
        if have apt-get && [ "$(id -u)" -eq 0 ]; then fresh_index; fi
        get "Java 17 or newer" "$(java_package)"
    fi
    have mvn || get Maven maven
    have openssl || get openssl openssl
    "$PYTHON" tests/kafka_broker.py fetch
    echo "parts: Java, Maven and the jars of Apache Kafka are there"
}

part_chromium
part_kafka
