#!/bin/bash
# shellcheck disable=SC2086 # KAFKA_HEAP_OPTS holds several words
exec java ${KAFKA_HEAP_OPTS:-} -cp '/opt/kafka/libs/*' -Dlog4j2.configurationFile=/opt/kafka/config/tools-log4j2.yaml \
    org.apache.kafka.tools.BrokerApiVersionsCommand "$@"
