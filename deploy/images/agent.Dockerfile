# The data owner's service. It listens nowhere: its ready line is printed when it has joined.
ARG BASE=python:3.11-slim
FROM ${BASE}
# Set to 1: install from deploy/wheels alone.
ARG PIP_NO_INDEX
# The same step as in oracle.Dockerfile, so that both images share this layer, the largest one.
RUN --mount=type=bind,source=constraints.txt,target=/src/constraints.txt \
    --mount=type=bind,source=deploy/wheels,target=/src/deploy/wheels \
    python3 -m venv /opt/veilfed \
    && /opt/veilfed/bin/pip install --no-cache-dir --constraint=/src/constraints.txt --find-links=/src/deploy/wheels \
       'torch>=2.9'
RUN --mount=type=bind,target=/src,rw \
    /opt/veilfed/bin/pip install --no-cache-dir --constraint=/src/constraints.txt --find-links=/src/deploy/wheels \
    '/src[agent]'
# A named volume that is mounted here gets this owner and mode.
RUN install -d -m 0700 -o 10001 -g 10001 /var/lib/veilfed
ENV OMP_NUM_THREADS=1 VEILFED_PACKAGES=/srv/packages
USER 10001:10001
WORKDIR /var/lib/veilfed
ENTRYPOINT ["/opt/veilfed/bin/veilfed"]
CMD ["agent", "serve", "--config", "/etc/veilfed/agent.yaml"]
