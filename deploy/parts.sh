#!/usr/bin/env bash
# parts.sh [NAME...]: installs the real parts that tests run against, or those named, each only if it is missing:
#   alertmanager  the distribution's Alertmanager, and a newer one built from its Go module
#   chromium   a headless browser with a font, for the dashboard
#   node_exporter  the Prometheus project's exporter, which the collector for other exporters is tried on
#   infiniband a simulated InfiniBand fabric: ibsim, opensm and the management tools
#   lldp       lldpd, which tells what an Ethernet port is cabled to
#   kafka      Java 17 or newer, Maven and openssl, then the jars of a real Apache Kafka
#   kerberos   a KDC (MIT krb5), and the Python package gssapi, built for this Python
#   slurm      slurmctld, slurmd and munge
#   slurmrestd Slurm 24.11 of Debian 13 in a folder of its own, whose slurmrestd can change nodes: 190 MB
#   kubernetes a real control plane and kwok, built from Go modules
#   redfish    DMTF's own clients and protocol validator, in a virtual environment of their own
#   helm       Helm, built from its Go module
#   ansible    ansible-core, in a virtual environment of its own
#   dist       what `make dist` needs: nfpm, built from its Go module, patchelf, strip and rpm
#   senders    a Prometheus server and an OpenTelemetry Collector, built from Go modules
#   oidc       Node.js and a certified OpenID Connect provider, for the dashboard's login
#   shells     zsh and fish, which execute their completion
#   promtool   Prometheus' own checks, of the distribution
#   spark      a Spark in a virtual environment of its own, which reads the sealed files: 450 MB
#   torch      a PyTorch for processors, for the training callback and the canary's GPU code: 150 MB, 650 MB installed
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

part_promtool() { # checks pages in the text format of Prometheus
    have promtool || get promtool prometheus
    echo "parts: promtool is there"
}

part_spark() { # kept in a cache folder
    local folder="${XDG_CACHE_HOME:-$HOME/.cache}/fleetpulse/spark"
    have_java || get Java "$(java_package)"
    [ -x "$folder/bin/spark-submit" ] || { "$PYTHON" -m venv "$folder" && "$folder/bin/python" -m pip install --quiet "pyspark==4.3.0"; }
    echo "parts: Spark is there"
}

part_alertmanager() { # the newer one takes a CPU minute; kept in a cache folder
    have prometheus-alertmanager || have alertmanager || get Alertmanager prometheus-alertmanager
    if have go; then
        "$PYTHON" tests/alertmanager.py >/dev/null
    else
        echo "parts: the newer Alertmanager is left out: no Go 1.25 or newer (https://go.dev/dl)" >&2
    fi
    echo "parts: Alertmanager is there"
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

GSSAPI=1.12.0 # kept in a cache folder, where tests find it: it is no dependency of ours
part_kerberos() { # the wheels of the package index are for other systems: it is built here, 40 s
    local at="${XDG_CACHE_HOME:-$HOME/.cache}/fleetpulse/gssapi/$GSSAPI"
    if ! have_command krb5kdc || ! have_command kadmin.local || ! have kinit; then
        get Kerberos krb5-kdc krb5-admin-server krb5-user
    fi
    if [ ! -d "$at/gssapi" ]; then
        have krb5-config && have gcc || get "what builds gssapi" libkrb5-dev gcc libc6-dev python3-dev
        "$PYTHON" -m venv "$at.build"
        "$at.build/bin/pip" install -q --target "$at" "gssapi==$GSSAPI"
        rm -r "$at.build"
    fi
    echo "parts: Kerberos is there"
}

part_node_exporter() {
    have prometheus-node-exporter || have node_exporter || get node_exporter prometheus-node-exporter
    echo "parts: node_exporter is there"
}

have_command() { PATH="$PATH:/usr/sbin:/sbin" have "$1"; }

have_infiniband() {
    have_command ibsim && have_command opensm && have_command iblinkinfo &&
        compgen -G '/usr/lib/*/umad2sim/libumad2sim.so' >/dev/null
}

part_infiniband() {
    have_infiniband || get "the InfiniBand simulator" ibsim-utils libumad2sim0 opensm infiniband-diags
    echo "parts: ibsim, opensm and infiniband-diags are there"
}

part_shells() {
    have zsh && have fish || get "zsh and fish" zsh fish
    echo "parts: zsh and fish are there"
}

part_lldp() {
    have_command lldpd || get lldpd lldpd
    echo "parts: lldpd is there"
}

have_slurm() { have_command slurmctld && have_command slurmd && have_command munged && have srun; }

part_slurmrestd() { # kept in a cache folder; Slurm of Debian 12 is too old, and both cannot be installed together
    local at="${XDG_CACHE_HOME:-$HOME/.cache}/fleetpulse/slurm/trixie"
    if [ ! -x "$at/usr/sbin/slurmrestd" ]; then
        have mmdebstrap || get mmdebstrap mmdebstrap
        rm -rf "$at"
        mkdir -p "$(dirname "$at")"
        mmdebstrap --mode=root --variant=apt --aptopt='APT::Install-Recommends "false"' --dpkgopt=force-unsafe-io \
            --include=slurmctld,slurmd,slurmrestd,slurm-client,slurm-wlm-basic-plugins,slurm-wlm-jwt-plugin,munge trixie "$at"
    fi
    echo "parts: slurmrestd is there"
}

part_slurm() {
    have_slurm || get Slurm slurmctld slurmd slurm-client munge
    echo "parts: Slurm and munge are there"
}

part_kubernetes() { # cold 11 CPU minutes; what comes out is kept in a cache folder
    if ! have go; then
        echo "parts: Kubernetes is left out: no Go 1.25 or newer (https://go.dev/dl)" >&2
        return
    fi
    have openssl || get openssl openssl
    "$PYTHON" tests/kubernetes_build.py >/dev/null
    echo "parts: etcd, apiserver, controller manager, scheduler, kubectl and kwok are built"
}

HELM=3.22.0 # a release of helm.sh/helm/v3
part_helm() { # cold a minute; kept in a cache folder
    local at="${XDG_CACHE_HOME:-$HOME/.cache}/fleetpulse/helm/$HELM"
    if ! have helm && [ ! -x "$at/helm" ]; then
        if ! have go; then
            echo "parts: Helm is left out: no Go 1.25 or newer (https://go.dev/dl)" >&2
            return
        fi
        GOBIN="$at" go install "helm.sh/helm/v3/cmd/helm@v$HELM"
    fi
    echo "parts: Helm is there"
}

NFPM=2.45.2 # deb and rpm of `make dist`
part_dist() { # cold five CPU minutes; kept in a cache folder
    local at="${XDG_CACHE_HOME:-$HOME/.cache}/fleetpulse/nfpm/$NFPM"
    have patchelf || get patchelf patchelf
    have strip || get strip binutils
    have rpm || get rpm rpm
    if ! have nfpm && [ ! -x "$at/nfpm" ]; then
        if ! have go; then
            echo "parts: nfpm is left out: no Go 1.25 or newer (https://go.dev/dl)" >&2
            return
        fi
        GOBIN="$at" go install "github.com/goreleaser/nfpm/v2/cmd/nfpm@v$NFPM"
    fi
    echo "parts: nfpm and patchelf are there"
}

ANSIBLE=2.19.14 # of ansible-core
part_ansible() { # kept in a cache folder: it brings its own versions of common packages
    local at="${XDG_CACHE_HOME:-$HOME/.cache}/fleetpulse/ansible/$ANSIBLE"
    if ! have ansible-playbook && [ ! -x "$at/bin/ansible-playbook" ]; then
        "$PYTHON" -m venv "$at"
        "$at/bin/pip" install -q "ansible-core==$ANSIBLE"
    fi
    echo "parts: ansible-core is there"
}

part_senders() { # cold 5 CPU minutes; kept in a cache folder
    if ! have go; then
        echo "parts: Prometheus and the Collector are left out: no Go 1.26 or newer (https://go.dev/dl)" >&2
        return
    fi
    "$PYTHON" tests/sender_build.py >/dev/null
    echo "parts: a Prometheus server and an OpenTelemetry Collector are built"
}

REDFISH=3.4.2 # of DMTF's library; the tools go with it
part_redfish() { # kept in a cache folder: its twenty packages are no business of ours
    local at="${XDG_CACHE_HOME:-$HOME/.cache}/fleetpulse/redfish/$REDFISH"
    if [ ! -x "$at/bin/rf_protocol_validator" ]; then
        "$PYTHON" -m venv "$at"
        "$at/bin/pip" install -q "redfish==$REDFISH" redfish_utilities==3.5.2 redfish_protocol_validator==1.3.2
    fi
    echo "parts: DMTF's Redfish clients are there"
}

part_oidc() { # kept in a cache folder
    have npm || get Node.js nodejs npm
    "$PYTHON" tests/oidc_build.py >/dev/null
    echo "parts: an OpenID Connect provider and axe-core are there"
}

have_torch() {
    local python
    for python in .venv/bin/python /usr/bin/python3; do
        [ ! -x "$python" ] || ! "$python" -c 'import numpy, torch' 2>/dev/null || return 0
    done
    return 1
}

part_torch() { # the wheels of the package index are for CUDA and take 3 GB; Debian's runs in Debian's own Python
    have_torch || get PyTorch python3-torch python3-numpy
    echo "parts: PyTorch is there"
}

ALL="alertmanager chromium redfish infiniband lldp node_exporter shells kafka kerberos slurm slurmrestd kubernetes helm dist ansible senders oidc promtool spark torch"
for name in ${*:-$ALL}; do
    if ! declare -F "part_$name" >/dev/null; then
        echo "parts: no part '$name'; there are: $ALL" >&2
        exit 2
    fi
done
for name in ${*:-$ALL}; do
    "part_$name"
done
