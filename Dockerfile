# One image for master, slave, member of a failover group and name server: the command says which.
FROM python:3.12-slim AS build
WORKDIR /src
# For the compiled twins of a few functions; without it the wheel would do all in Python, and slower.
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends gcc libc6-dev
COPY pyproject.toml hatch_build.py README.md ARCHITECTURE.md LICENSE ./
COPY ha ./ha
COPY pyspark_halog ./pyspark_halog
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
RUN useradd --uid 10911 --user-group --no-create-home --home-dir /data halog \
    && install -d -o halog -g halog /data
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[failover]" && rm -r /wheels
USER halog
# Relative store paths (data/master, data/slave) are below it: mount a volume here to keep them.
WORKDIR /data
ENV PYTHONUNBUFFERED=1
STOPSIGNAL SIGTERM
# Of the default command; whoever runs another one says with --health-cmd (or in a compose file) how that is asked.
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:10913/ready', timeout=4)"]
CMD ["python", "-m", "ha.master"]
