# dsv4-jax on NVIDIA GPUs: `docker build -t dsv4-jax .`, then docs/serving.md ("In a container").
# The extra cuda13 brings CUDA's libraries; the host brings the driver, 580 or newer, and the NVIDIA
# container toolkit.
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /opt/dsv4-jax
COPY pyproject.toml README.md LICENSE ./
COPY dsv4_jax dsv4_jax
COPY pallas_kernels pallas_kernels
RUN pip install '.[cuda13,serve]' && rm -rf /opt/dsv4-jax

# Compiled programs and downloaded models lie in its home; mount /home/dsv4/.cache to keep them.
RUN useradd --create-home dsv4 && install -d -o dsv4 /home/dsv4/.cache
USER dsv4
WORKDIR /home/dsv4

EXPOSE 8000
HEALTHCHECK --start-period=30m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["dsv4-jax"]
CMD ["serve", "--host", "0.0.0.0"]
