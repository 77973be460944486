"""HTTP for every program: addresses, calls to other servers, the client of the API, limits of a server."""
