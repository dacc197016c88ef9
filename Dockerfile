# The server as an image. docs/docker.md has the commands; in short:
#   docker build -t seqserve .                                  CPU
#   docker build -t seqserve:gpu --build-arg TORCH=cuda .       CUDA
#   docker build -t seqserve:ray --build-arg PACKAGES=ray .     CPU, for replicas on Ray
#
# BASE_IMAGE   any Debian-like image with Python 3.11 or newer; python3-venv is added where it lacks.
# PACKAGES     server or ray: the lock file in deploy/locks/ of all that is installed beside torch.
# TORCH        cpu or cuda: likewise, of torch. Empty: no lock files, but what pip finds for pyproject.toml.
# TORCH_INDEX  a package index that is searched beside pip's own.
# PIP_NO_INDEX 1: nothing but deploy/wheels/, for a build without a network.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
RUN python3 -c 'import ensurepip, venv' 2>/dev/null \
    || { apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates; }; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*; \
    python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11) and "BASE_IMAGE needs Python 3.11 or newer")'


FROM base AS build
ARG PACKAGES=server
ARG TORCH=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_NO_INDEX=0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /app

# pip and what builds the project stay out of the image: they have an environment of their own, and install into /opt/venv.
COPY deploy/wheels/ /wheels/
COPY deploy/locks/*.txt /locks/
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/venv \
    && /opt/pip/bin/pip install --require-hashes --find-links /wheels -r /locks/build.txt

# Dependencies before the code: this layer is built again only when pyproject.toml, the locks or the version change.
COPY pyproject.toml LICENSE ./
COPY seqserve/__init__.py seqserve/
RUN touch README.md && /opt/pip/bin/hatchling build -t wheel:editable -d /dist \
    && install() { /opt/pip/bin/pip --python /opt/venv/bin/python install --no-compile --find-links /wheels \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$@"; } \
    && if [ -n "$TORCH" ]; then \
        install --require-hashes -r "/locks/$PACKAGES.txt" -r "/locks/$TORCH.txt" && install --no-deps /dist/*.whl; \
    else \
        install "$(echo /dist/*.whl)[server,$PACKAGES]"; \
    fi
# What only compiling against a library or testing it needs: a quarter of a gigabyte.
RUN cd /opt/venv/lib/python3*/site-packages \
    && rm -rf torch/include torch/test torch/bin/*test* torch/bin/*Test* torch/bin/protoc* \
    && find sympy networkx mpmath numpy -type d -name tests -prune -exec rm -rf {} +
# Bytecode that is not checked against the sources' times: a layer's tar rounds those to seconds, half of them upwards,
# and Python would compile those files anew at every start. (One of torch's files needs a newer Python.)
RUN /opt/venv/bin/python -m compileall -qq --invalidation-mode unchecked-hash /opt/venv/lib || true
COPY README.md ./
COPY weights/ weights/
COPY seqserve/ seqserve/
COPY model/ model/
COPY service/ service/
# Readable by the user that serves, whatever the checkout's own permissions were.
RUN /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash seqserve model service \
    && chmod -R a+rX /app


FROM base
LABEL org.opencontainers.image.title="seqserve" \
      org.opencontainers.image.description="Inference server for encoder-decoder Transformers" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin seqserve && mkdir /models
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
# Everything is read-only to the server, which writes nothing outside /tmp.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SEQSERVE_HOST=0.0.0.0 \
    SEQSERVE_PORT=8000
WORKDIR /app
VOLUME /models
EXPOSE 8000
# The number, not the name, lets Kubernetes check that it is not root.
USER 10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['SEQSERVE_PORT'] + '/health', timeout=4)"]
# Exec form: the server is process 1 and gets SIGTERM itself, on which it drains.
ENTRYPOINT ["seqserve"]
CMD ["serve"]
