"""From the spools to Kafka: reads the spools of nodes and sends their messages, with retries and a rate limit."""
