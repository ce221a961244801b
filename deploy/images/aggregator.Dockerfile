# The coordinator's service. It has no torch and no model, and sees nobody's data.
ARG BASE=python:3.11-slim
FROM ${BASE}
# Set to 1: install from deploy/wheels alone.
ARG PIP_NO_INDEX
RUN --mount=type=bind,target=/src,rw \
    python3 -m venv /opt/veilfed \
    && /opt/veilfed/bin/pip install --no-cache-dir --constraint=/src/constraints.txt --find-links=/src/deploy/wheels \
       '/src[aggregator]'
# A named volume that is mounted here gets this owner and mode.
RUN install -d -m 0700 -o 10001 -g 10001 /var/lib/veilfed
USER 10001:10001
WORKDIR /var/lib/veilfed
EXPOSE 7443
# The port is bound once the service can answer. A call would need a client's certificate.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s \
    CMD ["/opt/veilfed/bin/python", "-c", "import socket; socket.create_connection(('127.0.0.1', 7443), 2).close()"]
ENTRYPOINT ["/opt/veilfed/bin/veilfed"]
CMD ["aggregator", "serve", "--config", "/etc/veilfed/aggregator.yaml"]
