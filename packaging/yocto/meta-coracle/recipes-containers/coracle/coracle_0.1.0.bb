SUMMARY = "Container runtime for small Kubernetes nodes"
DESCRIPTION = "Serves the Container Runtime Interface (CRI v1) to a kubelet or to k3s: the static programs of a release."
LICENSE = "Apache-2.0"
LIC_FILES_CHKSUM = "file://usr/share/licenses/coracle/LICENSE;md5=3b83ef96387f14655fc854ddc3c6bd57"

# Where the archive is, and its line of SHA256SUMS: to be set in local.conf or in a .bbappend.
CORACLE_SITE ?= "file://"
CORACLE_SHA256 ?= ""
CORACLE_TRIPLE = "${TARGET_ARCH}-unknown-linux-musl"
SRC_URI = "${CORACLE_SITE}/coracle-${PV}-${CORACLE_TRIPLE}.tar.gz"
SRC_URI[sha256sum] = "${CORACLE_SHA256}"
S = "${UNPACKDIR}/coracle-${PV}-${CORACLE_TRIPLE}"

COMPATIBLE_HOST = "(x86_64|aarch64).*-linux"
# Nothing is compiled.
INHIBIT_DEFAULT_DEPS = "1"
INHIBIT_PACKAGE_STRIP = "1"
INSANE_SKIP:${PN} += "already-stripped"

inherit systemd bash-completion

SYSTEMD_SERVICE:${PN} = "coracle.service"

do_configure[noexec] = "1"
do_compile[noexec] = "1"

do_install() {
    for program in coracled coracle coracle-pod; do
        install -D -m 0755 ${S}/usr/bin/$program ${D}${bindir}/$program
    done
    ln -s coracle ${D}${bindir}/coracle-worker
    install -D -m 0644 ${S}/usr/share/coracle/config.toml ${D}${sysconfdir}/coracle/config.toml
    install -D -m 0644 ${S}/usr/share/coracle/crictl.yaml ${D}${sysconfdir}/crictl.yaml
    install -D -m 0644 ${S}/usr/share/bash-completion/completions/coracle ${D}${datadir}/bash-completion/completions/coracle
    if ${@bb.utils.contains('DISTRO_FEATURES', 'systemd', 'true', 'false', d)}; then
        install -D -m 0644 ${S}/usr/lib/systemd/system/coracle.service ${D}${systemd_system_unitdir}/coracle.service
        install -D -m 0644 ${S}/usr/lib/tmpfiles.d/coracle.conf ${D}${nonarch_libdir}/tmpfiles.d/coracle.conf
    fi
}

CONFFILES:${PN} = "${sysconfdir}/coracle/config.toml ${sysconfdir}/crictl.yaml"
FILES:${PN} += "${nonarch_libdir}/tmpfiles.d ${systemd_system_unitdir}"
# The kernel's options: docs/kernel.md.
RRECOMMENDS:${PN} = "kernel-module-overlay kernel-module-veth kernel-module-br-netfilter kernel-module-nft-nat kernel-module-nft-masq"
