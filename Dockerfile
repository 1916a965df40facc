# Serves one checkpoint:  docker run -p 127.0.0.1:8000:8000 -v /models/CharRM:/model:ro charrm
# On GPUs add --gpus all; the image then needs the CUDA build of torch, pip's default on Linux.
FROM python:3.11-slim

WORKDIR /app
COPY pyproject.toml constraints.txt README.md ./
COPY charrm charrm
COPY server server
COPY golden golden
COPY bench bench
RUN pip install --no-cache-dir -c constraints.txt '.[serve]' \
    && useradd --create-home charrm
USER charrm

ENV CHARRM_MODEL=/model CHARRM_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=30s --start-period=30m --timeout=5s \
    CMD ["python", "-c", "import httpx; httpx.get('http://127.0.0.1:8000/health/ready').raise_for_status()"]
ENTRYPOINT ["python", "-m", "server"]
