"""From the spools to Kafka."""
