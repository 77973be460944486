"""What the pages about nodes, links and signals share: answers of the API, requests, links, tables."""
