# One image for master, slave, member of a failover group and name server: the command selects which.
FROM python:3.13-slim-trixie AS build
# Compiles the faster twins of some functions (docs/releasing.md). Nothing of this stage but /opt/halog is in the image.
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY pyproject.toml build_backend.py hatch_build.py README.md ARCHITECTURE.md LICENSE ./
COPY ha ./ha
COPY pyspark_halog ./pyspark_halog
# -g0: no debug information in the compiled modules. NumPy's own tests are a quarter of what is installed; its f2py and
# C headers, and stubs for type checkers, are for development.
RUN python -m venv --without-pip /opt/halog \
    && CFLAGS=-g0 pip --python /opt/halog/bin/python install --no-cache-dir ".[failover]" \
    && find /opt/halog -type d '(' -name tests -o -path '*/numpy/f2py' -o -path '*/numpy/*/include' ')' -prune -exec rm -r {} + \
    && find /opt/halog '(' -name '*.pyi' -o -name '*.a' ')' -delete

FROM python:3.13-slim-trixie
LABEL org.opencontainers.image.title="halog" \
      org.opencontainers.image.description="A replicated message log that speaks Apache RocketMQ's protocols" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10911 --user-group --no-create-home --home-dir /data halog \
    && install -d -o halog -g halog /data
COPY --from=build /opt/halog /opt/halog
ENV PATH=/opt/halog/bin:$PATH PYTHONUNBUFFERED=1
USER halog
# Relative store paths (data/master, data/slave) are below this directory: mount a volume here to keep them.
WORKDIR /data
STOPSIGNAL SIGTERM
# Asks a broker's admin port. A name server has none: give it its own health check, as docker-compose.yml does.
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(u.Request('http://127.0.0.1:10913/ready', headers={'Authorization': 'Bearer ' + os.environ.get('HA_ADMIN_TOKEN', '')}), timeout=4)"]
CMD ["python", "-m", "ha.master"]
