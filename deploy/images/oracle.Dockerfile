# The model owner's service, for the institution's own zone. The model is mounted, never part of the image.
ARG BASE=python:3.11-slim
FROM ${BASE}
# Set to 1: install from deploy/wheels alone.
ARG PIP_NO_INDEX
# The same step as in agent.Dockerfile, so that both images share this layer, the largest one.
RUN --mount=type=bind,source=constraints.txt,target=/src/constraints.txt \
    --mount=type=bind,source=deploy/wheels,target=/src/deploy/wheels \
    python3 -m venv /opt/veilfed \
    && /opt/veilfed/bin/pip install --no-cache-dir --constraint=/src/constraints.txt --find-links=/src/deploy/wheels \
       'torch>=2.9'
RUN --mount=type=bind,target=/src,rw \
    /opt/veilfed/bin/pip install --no-cache-dir --constraint=/src/constraints.txt --find-links=/src/deploy/wheels \
    '/src[oracle]'
# A named volume that is mounted here gets this owner and mode.
RUN install -d -m 0700 -o 10001 -g 10001 /var/lib/veilfed
ENV OMP_NUM_THREADS=1 VEILFED_PACKAGES=/srv/packages
USER 10001:10001
WORKDIR /var/lib/veilfed
EXPOSE 7441
# The port is bound once the model is loaded. A call would need a client's certificate.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s \
    CMD ["/opt/veilfed/bin/python", "-c", "import socket; socket.create_connection(('127.0.0.1', 7441), 2).close()"]
ENTRYPOINT ["/opt/veilfed/bin/veilfed"]
CMD ["oracle", "serve", "--config", "/etc/veilfed/oracle.yaml"]
