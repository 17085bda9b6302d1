# A node of a Slurm cluster: Debian's Slurm and munge, and a user whose jobs run there.
FROM python:3.11-slim
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      munge procps slurm-wlm >/dev/null && \
    rm -rf /var/lib/apt/lists/* && useradd --create-home --shell /bin/bash me && \
    mkdir -p /run/munge /var/lib/slurm/ctld && chown munge /run/munge
CMD ["sleep", "infinity"]
