# docker build --tag ddpforge:local .      see docs/guides/docker.md
FROM python:3.12-slim

# torch.compile needs a C++ compiler; git and curl are for plugins that come from repositories.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git curl \
    && rm -rf /var/lib/apt/lists/*

# Extras to install, e.g. --build-arg EXTRAS=vision,deepspeed
ARG EXTRAS=vision,metrics

COPY pyproject.toml README.md LICENSE NOTICE /source/
COPY ddpforge /source/ddpforge
COPY recipes /source/recipes
RUN pip install --no-cache-dir "/source[${EXTRAS}]" && rm -rf /source

# Recipes, data and runs are mounted here.
WORKDIR /work
ENTRYPOINT ["ddpforge"]
CMD ["--help"]
