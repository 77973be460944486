#!/usr/bin/env bash
# bare_machine.sh ROOT NAME: starts systemd as process 1 over the folder ROOT, in cgroups and namespaces of its own.
# The network is the caller's. Needs root; ends with all its processes when it is killed. NAME: of the cgroups.
set -euo pipefail

# of a line of /proc/mounts: what `mount -t cgroup -o` needs to mount the same hierarchy again
hierarchy() {
    local kept
    kept=$(tr ',' '\n' <<<"$1" | grep -vE '^(rw|ro|relatime|nosuid|nodev|noexec|xattr|nsdelegate|memory_.*|favordynmods|release_agent=.*|clone_children)$' | paste -sd, || true)
    case $kept in name=*) echo "none,$kept" ;; *) echo "$kept" ;; esac
}

if [ "${1:-}" != --boot ]; then
    while read -r _ place kind _; do
        case $kind in cgroup | cgroup2) ;; *) continue ;; esac
        mkdir -p "$place/$2"
        if [ -e "$place/cpuset.cpus" ]; then
            cat "$place/cpuset.cpus" >"$place/$2/cpuset.cpus"
            cat "$place/cpuset.mems" >"$place/$2/cpuset.mems"
        fi
        echo $$ >"$place/$2/cgroup.procs"
    done </proc/mounts
    exec unshare --pid --mount --cgroup --uts --ipc --fork --kill-child --propagation private "$0" --boot "$1"
fi

root=$2
cgroups=$(grep -E ' (cgroup|cgroup2) ' /proc/mounts)
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
grep -q '^cgroup2 /sys/fs/cgroup ' <<<"$cgroups" || mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
while read -r _ place kind settings _; do
    mkdir -p "$root$place"
    if [ "$kind" = cgroup2 ]; then mount -t cgroup2 cgroup2 "$root$place"; else mount -t cgroup -o "$(hierarchy "$settings")" cgroup "$root$place"; fi
done <<<"$cgroups"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    : >"$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
hostname "$(cat "$root/etc/hostname")"
cd "$root"
mkdir -p .outside
pivot_root . .outside
umount -l /.outside
mount --make-rshared / # as the manager of containers does: systemd hands credentials over by mounts
exec env -i container=fleetpulse-test PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb /lib/systemd/systemd --log-target=journal
