# Octavo's server with the embedded model on port 8000, as a user without rights.
#
#   docker build -t octavo . && docker run --rm -p 8000:8000 octavo [serve's flags]
#
# The base may be anything with Python 3.11+ and its venv module (Debian: python3 python3-venv). The secrets are for
# building behind a proxy or an own package index; they exist while pip runs and are in no layer. See docs/image.md.
ARG BASE_IMAGE=python:3.12-slim
# --build-arg EXTRAS=fast adds the compiled kernels for real models (200 MB), compiled for the machine that builds.
ARG EXTRAS=""

FROM ${BASE_IMAGE} AS build
ARG EXTRAS
WORKDIR /src
# Dependencies first and by themselves: a change of the code then reuses this layer.
COPY pyproject.toml constraints.txt ./
RUN EXTRAS="${EXTRAS}" python3 -c "import os, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*p['dependencies'], *(d for e in os.environ['EXTRAS'].split() for d in p['optional-dependencies'][e]), sep='\n')" \
        > requirements.txt && python3 -m venv /opt/octavo
RUN --mount=type=secret,id=pip_conf,target=/run/secrets/pip.conf \
    --mount=type=secret,id=ca_bundle,target=/run/secrets/ca.pem \
    PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/octavo/bin/python -m pip install \
        --no-cache-dir --disable-pip-version-check --constraint constraints.txt --requirement requirements.txt
COPY README.md ./
COPY app app
COPY core core
COPY loadgen loadgen
COPY octavo octavo
RUN --mount=type=secret,id=pip_conf,target=/run/secrets/pip.conf \
    --mount=type=secret,id=ca_bundle,target=/run/secrets/ca.pem \
    PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/octavo/bin/python -m pip install \
        --no-cache-dir --disable-pip-version-check --no-deps .
# A sixth of it all is packages' own tests and a build tool: nothing asks for them at run time. pip stays, for it is what
# `octavo pull` fetches models with.
RUN /opt/octavo/bin/python -m pip uninstall --yes --quiet setuptools \
    && find /opt/octavo -type d -name tests -prune -exec rm -r {} +

FROM ${BASE_IMAGE}
# A home that can be written, and mounted: pulled models are kept in its .cache.
RUN useradd --uid 10001 --create-home octavo
# The environment brings its bytecode compiled (pip does that), so a read-only file system starts as fast.
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OCTAVO_HOST=0.0.0.0 \
    OCTAVO_PORT=8000
USER 10001
WORKDIR /home/octavo
ARG EXTRAS
RUN case " ${EXTRAS} " in *" fast "*) python -m core.model.kernels .cache/octavo;; esac
EXPOSE 8000
STOPSIGNAL SIGTERM
# http.client and not urllib: the latter would ask a proxy named in the environment.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['OCTAVO_PORT']), timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["octavo", "serve"]
