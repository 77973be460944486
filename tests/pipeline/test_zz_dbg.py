import pytest, time
from tests.pipeline.test_kafka_failures import *
from tests.pipeline.kafka_line import *
@pytest.mark.parametrize("way", ["none","deleted"])
def test_x(own_broker, new_line, brisk, way):
    out = open("/tmp/h6/dbg.out","a")
    if way == "none":
        own_broker.kill()
        line = new_line(kafka_of(own_broker)).begin()
        line.seen("connection refused", "connection refused")
        own_broker.start()
    else:
        line = new_line(make_topics(own_broker)).begin()
        line.well()
        delete_topics(own_broker, [TELEMETRY])
    for i in range(13):
        time.sleep(2)
        print(way, 2*i+2, line.sender.trouble(), "|", line.sender.flow.in_flight, line.sender.clients, line.sender._outlook._closed, [(s.trouble, len(s.waiting)) for s in line.sender._streams], file=out, flush=True)
