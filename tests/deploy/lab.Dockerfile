# A bare host of a lab: Debian with systemd and sshd, and a user whose units outlive a log-out.
FROM python:3.11-slim
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      systemd systemd-sysv dbus dbus-user-session libpam-systemd openssh-server procps >/dev/null && \
    rm -rf /var/lib/apt/lists/* && useradd --create-home --shell /bin/bash me && \
    mkdir -p /home/me/.ssh && chown me /home/me/.ssh
STOPSIGNAL SIGRTMIN+3
CMD ["/lib/systemd/systemd"]
