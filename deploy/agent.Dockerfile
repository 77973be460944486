# The agent alone, for nodes: docker build -f deploy/agent.Dockerfile -t fleetpulse-agent:local .
FROM python:3.11-slim AS build
WORKDIR /src
# As in deploy/Dockerfile: a folder .wheels, if there is one, serves builds without a package index.
COPY pyproject.toml .wheels* /wheels/
ARG PIP_NO_INDEX=
ENV PIP_FIND_LINKS=/wheels PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml constraints.txt README.md LICENSE fleetpulse.py ./
COPY deploy/requirements.py deploy/build.txt deploy/
COPY agents agents
COPY pipeline pipeline
COPY detectors detectors
COPY dashboards dashboards
RUN python -m venv /opt/fleetpulse \
 && python deploy/requirements.py agent > requirements.txt \
 && sed -n '/^pip==/,/[^\\]$/p' constraints.txt > pip.txt \
 && /opt/fleetpulse/bin/pip install --require-hashes --requirement pip.txt \
 && /opt/fleetpulse/bin/pip install --require-hashes --constraint constraints.txt --requirement requirements.txt \
 && /opt/fleetpulse/bin/pip install --no-deps --no-build-isolation . \
 && /opt/fleetpulse/bin/pip uninstall --yes hatchling editables pathspec trove-classifiers pip setuptools

FROM python:3.11-slim
COPY --from=build /opt/fleetpulse /opt/fleetpulse
RUN groupadd --system --gid 8600 fleetpulse \
 && useradd --system --uid 8600 --gid 8600 --home-dir /var/lib/fleetpulse --shell /usr/sbin/nologin fleetpulse \
 && install -d -o fleetpulse -g fleetpulse -m 0700 /var/lib/fleetpulse \
 && install -d -o fleetpulse -g fleetpulse -m 0755 /run/fleetpulse /run/fleetpulse/agent
ENV PATH=/opt/fleetpulse/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONFAULTHANDLER=1 \
    FLEETPULSE__SPOOL__DIRECTORY=/var/lib/fleetpulse/spool RUNTIME_DIRECTORY=/run/fleetpulse/agent
USER 8600:8600
WORKDIR /var/lib/fleetpulse
# Whether the agent is alive, not whether its node is fit: it writes this file every 10 s. `fleetpulse check` would say the
# same at fifty times the cost.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["sh", "-c", "test -n \"$(find \"$RUNTIME_DIRECTORY\" -name '*.status.json' -mmin -1)\""]
ENTRYPOINT ["fleetpulse"]
CMD ["agent"]
