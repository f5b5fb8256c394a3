# llamaops and its engine for x86-64-v3 CPUs. Made by `llamaops deploy`; nothing in it is particular to a profile.
#   docker build -f Dockerfile -t llamaops:0.1.0-x86-64-v3 CONTEXT
# CONTEXT: any folder; put a wheel there and say --build-arg LLAMAOPS=./NAME.whl to use it.
ARG PYTHON=docker.io/library/python:3.12-slim-bookworm

FROM ${PYTHON} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends cmake g++ ninja-build patch \
 && rm -rf /var/lib/apt/lists/*
ARG LLAMAOPS=llamaops==0.1.0
WORKDIR /context
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/llamaops \
 && if [ -f constraints.txt ]; then export PIP_CONSTRAINT=/context/constraints.txt; fi \
 && /opt/llamaops/bin/pip install --disable-pip-version-check "${LLAMAOPS}"
# The cache mount keeps the build between image builds: its key covers source, flags and compiler.
RUN --mount=type=cache,target=/build \
    engine="$(LLAMAOPS_CACHE=/build /opt/llamaops/bin/llamaops engine build -D GGML_NATIVE=OFF -D GGML_SSE42=ON -D GGML_AVX=ON -D GGML_AVX2=ON -D GGML_BMI2=ON -D GGML_FMA=ON -D GGML_F16C=ON -D GGML_AVX512=OFF)" \
 && install -s -m 0755 "$(dirname "${engine}")/llama-server" "$(dirname "${engine}")/llama-quantize" \
      "$(dirname "${engine}")/llama-imatrix" /opt/llamaops/bin/

FROM ${PYTHON}
# util-linux: taskset, chrt, setpriv. tini: as PID 1 it reaps what others leave behind, and passes signals on.
RUN apt-get update \
 && apt-get install -y --no-install-recommends libgomp1 libstdc++6 numactl tini util-linux \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/llamaops /opt/llamaops
# Whatever account it runs as, and with a read-only root: only the cache (a volume) and /run/llamaops (a tmpfs) are written.
RUN mkdir -p /etc/llamaops /models /var/cache/llamaops /run/llamaops \
 && chmod 1777 /var/cache/llamaops /run/llamaops
ENV PATH=/opt/llamaops/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/cache/llamaops \
    LLAMAOPS_CACHE=/var/cache/llamaops \
    XDG_RUNTIME_DIR=/run/llamaops \
    XDG_STATE_HOME=/run/llamaops/state \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LANG=C.UTF-8
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=15s --retries=3 \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8080 && printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3 && read -r -t 4 line <&3 && [[ $line == *' 200 '* ]]"]
ENTRYPOINT ["tini", "--", "llamaops"]
CMD ["up", "/etc/llamaops/llamaops.yaml", "--no-build"]
