# Server on a CPU: docker build -t dflash-jax . && docker run -p 127.0.0.1:8000:8000 dflash-jax
# The native kernels are compiled with the image, for CPUs with AVX2, AVX-VNNI and AVX-512.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml README.md LICENSE hatch_build.py ./
COPY dflash_jax dflash_jax
COPY converters converters
ENV HATCH_BUILD_HOOKS_ENABLE=1
RUN python -m venv /opt/dflash && /opt/dflash/bin/pip install --no-cache-dir ".[serve,hub]"

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 dflash \
    && install -d -o dflash -g dflash -m 700 /home/dflash/.cache
COPY --from=build /opt/dflash /opt/dflash
ENV PATH=/opt/dflash/bin:$PATH JAX_PLATFORMS=cpu
USER dflash
WORKDIR /home/dflash
# Compiled programs and prefixes; a volume keeps them.
VOLUME /home/dflash/.cache
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"
ENTRYPOINT ["dflash-jax"]
CMD ["serve", "--host", "0.0.0.0"]
