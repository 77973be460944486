# Sourced by run: sees that the images which docker-compose.yml names are there.
#
# What a registry gives is used. Where none is in reach, stand-ins are built under the official names: Debian's own
# Python 3.11 for python:3.11-slim, and the same Kafka release from Maven Central for apache/kafka. Downloads are kept in
# $CACHE; stand-ins go with our own engine, or are removed at the end from one that was here before.

PYTHON_IMAGE=python:3.11-slim
STAND_INS=()

images_up() {
    KAFKA_IMAGE=$(sed -n 's/^ *image: \(apache\/kafka:.*\)$/\1/p' docker-compose.yml)
    at_hand "$PYTHON_IMAGE" || python_stand_in
    at_hand "$KAFKA_IMAGE" || kafka_stand_in
}

images_down() {
    [ ${#STAND_INS[@]} -eq 0 ] || [ -n "$OWN_ENGINE" ] || docker image rm --force "${STAND_INS[@]}" >/dev/null
}

at_hand() {
    docker image inspect "$1" >/dev/null 2>&1 || docker pull --quiet "$1" >/dev/null 2>&1
}

# debian NAME PACKAGES [HOOK]: a Debian 12 with these packages as $CACHE/NAME.tar
debian() {
    [ -s "$CACHE/$1.tar" ] && return
    say "making a Debian 12 with $2"
    mmdebstrap --quiet --mode=root --variant=minbase --dpkgopt=force-unsafe-io --include="$2" \
        ${3:+--customize-hook="$3"} bookworm "$WORK/$1.tar" >&2
    mv "$WORK/$1.tar" "$CACHE/$1.tar"
}

python_stand_in() {
    debian python python3,python3-venv,ca-certificates 'ln -s /usr/bin/python3 "$1/usr/local/bin/python"'
    docker import "$CACHE/python.tar" "$PYTHON_IMAGE" >/dev/null
    STAND_INS+=("$PYTHON_IMAGE")
    wheels
    say "$PYTHON_IMAGE is a stand-in: Debian 12 with its Python 3.11"
}

# Containers of an engine without a registry have no package index either: pip gets a folder of wheels.
wheels() {
    local kept platform
    kept=$CACHE/wheels-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-12)
    platform=$(uname -m)
    if [ ! -d "$kept" ]; then
        say "downloading wheels"
        "$PYTHON" deploy/requirements.py all kubernetes >"$WORK/requirements.txt"
        "$PYTHON" -m pip download --quiet --disable-pip-version-check --dest "$WORK/wheels" --only-binary :all: \
            --python-version 3.11 --implementation cp --platform "manylinux_2_28_$platform" \
            --platform "manylinux_2_17_$platform" --platform "manylinux2014_$platform" \
            --require-hashes --constraint constraints.txt --requirement "$WORK/requirements.txt" >&2
        rm -rf "$CACHE"/wheels-*
        mv "$WORK/wheels" "$kept"
    fi
    cp -r "$kept" "$CHECKOUT/.wheels"
    export PIP_NO_INDEX=1
}

kafka_stand_in() {
    local version=${KAFKA_IMAGE##*:} context=$WORK/kafka
    local libs=$CACHE/kafka-$version
    debian java openjdk-17-jre-headless
    docker import "$CACHE/java.tar" fleetpulse-compose-test/java:17 >/dev/null
    if [ ! -d "$libs" ]; then
        say "downloading Kafka $version"
        grep -q "<version>$version</version>" tests/kafka_broker_pom.xml \
            || { say "tests/kafka_broker_pom.xml has another release than $version"; return 1; }
        local maven=(mvn -B -ntp -q -f tests/kafka_broker_pom.xml -DoutputDirectory="$WORK/libs")
        "${maven[@]}" dependency:copy-dependencies -DincludeScope=runtime >&2
        "${maven[@]}" dependency:copy -Dartifact="org.apache.kafka:kafka-tools:$version" >&2
        mv "$WORK/libs" "$libs"
    fi
    cp -r deploy/compose_test/kafka "$context"
    cp -r "$libs" "$context/libs"
    docker build --quiet --tag "$KAFKA_IMAGE" "$context" >"$WORK/kafka.log" 2>&1 || { tail -5 "$WORK/kafka.log" >&2; return 1; }
    STAND_INS+=("$KAFKA_IMAGE" fleetpulse-compose-test/java:17)
    say "$KAFKA_IMAGE is a stand-in: the same release from Maven Central"
}
