# Server on a CPU: docker build -t dflash-jax . && docker run -p 8000:8000 dflash-jax
# The native kernels are compiled for the CPU of the machine that builds the image. On another kind of
# CPU add a compiler to the second stage (--build-arg PACKAGES=g++); they are compiled at first start.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY dflash_jax dflash_jax
COPY converters converters
RUN python -m venv /opt/dflash && /opt/dflash/bin/pip install --no-cache-dir ".[serve,hub]"
ENV DFLASH_NATIVE=/opt/dflash/native
RUN /opt/dflash/bin/dflash-jax native

FROM python:3.12-slim
ARG PACKAGES=""
RUN if [ -n "$PACKAGES" ]; then apt-get update && apt-get install -y --no-install-recommends $PACKAGES \
    && rm -rf /var/lib/apt/lists/*; fi && useradd --create-home --uid 10001 dflash
COPY --from=build --chown=dflash /opt/dflash /opt/dflash
ENV PATH=/opt/dflash/bin:$PATH DFLASH_NATIVE=/opt/dflash/native JAX_PLATFORMS=cpu
USER dflash
WORKDIR /home/dflash
# Compiled programs and prefixes; a volume keeps them.
VOLUME /home/dflash/.cache
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"
ENTRYPOINT ["dflash-jax"]
CMD ["serve", "--host", "0.0.0.0"]
