# An image that trains: docker build -t olm .
# Packages by the hashes of their files; torch brings its own CUDA, so the base has none.
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/olm
ENV PATH=/opt/olm/bin:$PATH
# What changes seldom comes first: a layer of its own.
COPY requirements/image.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/image.txt \
  && pip install --no-cache-dir torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY olm_data olm_data
COPY olm_train olm_train
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.12.11-slim-bookworm
# torch.compile builds small programs; the release of the base decides the version.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends gcc libc6-dev \
  && rm -rf /var/lib/apt/lists/* \
  && groupadd --gid 10001 olm \
  && useradd --uid 10001 --gid olm --create-home olm
COPY --from=build /opt/olm /opt/olm
ENV PATH=/opt/olm/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/olm
CMD ["olm-train", "--help"]
