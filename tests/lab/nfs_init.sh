#!/bin/sh
# The first program of a machine of NfsLab: the host's files read-only below, its own /etc, /tmp and
# /scratch, a network, the kernel's NFS server or what a client needs, then the agent.
#
# From the kernel's command line: lab_role=server|client lab_name=a lab_ip=10.77.0.2 lab_root=DIR (where the
# Debian packages were unpacked) lab_binds=DIR:DIR (what is in no plain place) lab_python, lab_repository.
PATH=/usr/sbin:/usr/bin:/sbin:/bin:$lab_root/usr/sbin:$lab_root/sbin:$lab_root/usr/bin
export PATH HOME=/root
busybox=$lab_root/bin/busybox

make_root() {
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    mount -t tmpfs root /mnt
    for at in /*; do
        name=${at#/}
        case $name in
        proc | sys | dev | tmp | run | mnt | var | scratch | nfs | export | etc) mkdir "/mnt/$name" ;;
        *)
            if [ -L "$at" ]; then
                cp -P "$at" "/mnt/$name"
            elif [ -d "$at" ]; then
                mkdir "/mnt/$name" && mount --bind "$at" "/mnt/$name"
            fi
            ;;
        esac
    done
    cp -a /etc/. /mnt/etc/ 2>/dev/null
    for at in /proc /sys; do mount --bind $at /mnt$at; done
    mount -t devtmpfs dev /mnt/dev
    mkdir -p /mnt/tmp /mnt/scratch /mnt/nfs /mnt/export
    mkdir -p /mnt/scratch /mnt/dev/shm /mnt/dev/pts /mnt/run/rpcbind /mnt/run/lock /mnt/var/log /mnt/var/tmp
    mkdir -p /mnt/var/lib/nfs/rpc_pipefs /mnt/var/lib/nfs/v4recovery /mnt/var/lib/nfs/sm /mnt/var/lib/nfs/sm.bak
    ln -s /run /mnt/var/run
    mount -t tmpfs shm /mnt/dev/shm
    mount -t devpts devpts /mnt/dev/pts
    mount -t tmpfs tmp /mnt/tmp
    mount -t tmpfs scratch /mnt/scratch
    IFS=:
    for at in $lab_binds; do mkdir -p "/mnt$at" && mount --bind "$at" "/mnt$at"; done
    unset IFS
    ln -sf /proc/mounts /mnt/etc/mtab
}

name_everything() {
    hostname "$lab_name"
    printf '127.0.0.1 localhost\n10.77.0.1 server\n10.77.0.2 a\n10.77.0.3 b\n' >/etc/hosts
    printf 'hosts: files\nrpc: files\nservices: files\nprotocols: files\npasswd: files\ngroup: files\n' >/etc/nsswitch.conf
    printf 'tcp 6 TCP\nudp 17 UDP\n' >/etc/protocols
    printf 'sunrpc 111/tcp portmapper rpcbind\nsunrpc 111/udp portmapper rpcbind\n' >/etc/services
    printf 'nfs 2049/tcp\nnfs 2049/udp\n' >>/etc/services
    printf 'rpcbind 100000 portmap sunrpc\nnfs 100003\nmountd 100005\nnlockmgr 100021\nstatus 100024\n' >/etc/rpc
    cp "$lab_root/etc/netconfig" /etc/netconfig
    echo '_rpc:x:127:65534::/run/rpcbind:/usr/sbin/nologin' >>/etc/passwd
    echo 'statd:x:128:65534::/var/lib/nfs:/usr/sbin/nologin' >>/etc/passwd
    chown -R 128 /var/lib/nfs/sm /var/lib/nfs/sm.bak
}

network() {
    ip link set lo up
    for link in /sys/class/net/vec*; do link=${link##*/}; done
    ip addr add "$lab_ip/24" dev "$link"
    ip link set "$link" mtu 1500 up
}

load() {
    modules=$lab_root/usr/lib/uml/modules/$(uname -r)
    found=$(grep "/$1\.ko:" "$modules/modules.dep") || return 0
    order=
    for one in ${found#*:}; do order="$one $order"; done
    for one in $order "${found%%:*}"; do "$busybox" insmod "$modules/$one" 2>/dev/null; done
}

serve() {
    load nfsd
    mount -t nfsd nfsd /proc/fs/nfsd
    mkdir -p /export
    mount -t ext4 /dev/ubda /export
    mkdir -p /export/small
    mount -t ext4 /dev/ubdb /export/small
    chmod 1777 /export /export/small
    touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/xtab
    rpcbind
    rpc.statd
    # The grace period of a restarted server, in seconds: 90 by default, and no less than 10 is taken.
    echo 10 >/proc/fs/nfsd/nfsv4gracetime
    echo 10 >/proc/fs/nfsd/nfsv4leasetime
    printf '%s\n' \
        '/export *(rw,sync,no_root_squash,no_subtree_check,fsid=0,insecure)' \
        '/export/small *(rw,sync,no_root_squash,no_subtree_check,fsid=1,insecure)' >/etc/exports
    exportfs -ra
    rpc.nfsd -V 3 -V 4.1 -V 4.2 4
    rpc.mountd
}

if [ "$1" != inside ]; then
    make_root
    exec chroot /mnt "$0" inside
fi
name_everything
network
load nfsv3
load nfsv4
export LD_LIBRARY_PATH="$lab_root/usr/lib/x86_64-linux-gnu:$lab_root/lib/x86_64-linux-gnu"
mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
if [ "$lab_role" = server ]; then serve; else rpcbind && rpc.statd; fi
export LAB_LIBRARIES="$LD_LIBRARY_PATH"
unset LD_LIBRARY_PATH
cd "$lab_repository" || exit 1
exec "$lab_python" -B -m tests.lab.nfs_agent
