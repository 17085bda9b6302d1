# Images for CPUs and for CUDA: docker buildx bake cpu, docker buildx bake cuda
#
# cuda takes torch from the package index, whose build for Linux x86-64 has CUDA. cpu needs TORCH_INDEX
# or WHEELS_DIR with a build for CPUs.
variable "TORCH_INDEX" { default = "" }
variable "WHEELS_DIR" { default = "deploy/empty" }
variable "REGISTRY" { default = "" }
variable "CA_FILE" { default = "deploy/empty/.keep" }
variable "NATS_IMAGE" { default = null }
variable "REDIS_IMAGE" { default = null }
variable "S3_IMAGE" { default = null }

target "base" {
  dockerfile = "deploy/Dockerfile"
  contexts   = { wheels = WHEELS_DIR }
  secret     = ["id=ca,src=${CA_FILE}"]
}

target "cpu" {
  name     = "cpu-${service}"
  inherits = ["base"]
  matrix = {
    service = [
      "scheduler", "rollout", "trainer", "reward", "reward-models", "view", "report", "host", "nats", "redis", "s3",
    ]
  }
  target = service
  args = {
    TORCH_INDEX = TORCH_INDEX
    NATS_IMAGE  = NATS_IMAGE
    REDIS_IMAGE = REDIS_IMAGE
    S3_IMAGE    = S3_IMAGE
  }
  tags     = ["${REGISTRY}digenrl-${service}:cpu"]
}

target "cuda" {
  name     = "cuda-${service}"
  inherits = ["base"]
  matrix   = { service = ["rollout", "trainer", "reward-models", "host"] }
  target   = service
  contexts = { wheels = "deploy/empty" }
  tags     = ["${REGISTRY}digenrl-${service}:cuda"]
}
