################################################################################
#
# coracle
#
################################################################################

# The static programs of a release: Buildroot's Rust may be older than the one that coracle is pinned to. `make dist` makes the
# archive; add its line of SHA256SUMS to coracle.hash beside this file.
CORACLE_VERSION = 0.1.0
CORACLE_SITE = $(call qstrip,$(BR2_PACKAGE_CORACLE_SITE))
CORACLE_SOURCE = coracle-$(CORACLE_VERSION)-$(ARCH)-unknown-linux-musl.tar.gz
CORACLE_LICENSE = Apache-2.0
CORACLE_LICENSE_FILES = usr/share/licenses/coracle/LICENSE
CORACLE_ADD_TOOLCHAIN_DEPENDENCY = NO

define CORACLE_INSTALL_TARGET_CMDS
	$(INSTALL) -D -m 0755 $(@D)/usr/bin/coracled $(TARGET_DIR)/usr/bin/coracled
	$(INSTALL) -D -m 0755 $(@D)/usr/bin/coracle $(TARGET_DIR)/usr/bin/coracle
	$(INSTALL) -D -m 0755 $(@D)/usr/bin/coracle-pod $(TARGET_DIR)/usr/bin/coracle-pod
	ln -sf coracle $(TARGET_DIR)/usr/bin/coracle-worker
	$(INSTALL) -D -m 0644 $(@D)/usr/share/coracle/config.toml $(TARGET_DIR)/etc/coracle/config.toml
	$(INSTALL) -D -m 0644 $(@D)/usr/share/coracle/crictl.yaml $(TARGET_DIR)/etc/crictl.yaml
endef

define CORACLE_INSTALL_INIT_SYSTEMD
	$(INSTALL) -D -m 0644 $(@D)/usr/lib/systemd/system/coracle.service \
		$(TARGET_DIR)/usr/lib/systemd/system/coracle.service
	$(INSTALL) -D -m 0644 $(@D)/usr/lib/tmpfiles.d/coracle.conf $(TARGET_DIR)/usr/lib/tmpfiles.d/coracle.conf
endef

define CORACLE_INSTALL_INIT_OPENRC
	$(INSTALL) -D -m 0755 $(@D)/usr/share/coracle/openrc/coracle.initd $(TARGET_DIR)/etc/init.d/coracle
	$(INSTALL) -D -m 0644 $(@D)/usr/share/coracle/openrc/coracle.confd $(TARGET_DIR)/etc/conf.d/coracle
endef

# What docs/kernel.md requires, and what the built-in network uses.
define CORACLE_LINUX_CONFIG_FIXUPS
	$(call KCONFIG_ENABLE_OPT,CONFIG_OVERLAY_FS)
	$(call KCONFIG_ENABLE_OPT,CONFIG_TMPFS)
	$(call KCONFIG_ENABLE_OPT,CONFIG_UNIX98_PTYS)
	$(call KCONFIG_ENABLE_OPT,CONFIG_POSIX_MQUEUE)
	$(call KCONFIG_ENABLE_OPT,CONFIG_NAMESPACES)
	$(call KCONFIG_ENABLE_OPT,CONFIG_PID_NS)
	$(call KCONFIG_ENABLE_OPT,CONFIG_NET_NS)
	$(call KCONFIG_ENABLE_OPT,CONFIG_IPC_NS)
	$(call KCONFIG_ENABLE_OPT,CONFIG_UTS_NS)
	$(call KCONFIG_ENABLE_OPT,CONFIG_BPF_SYSCALL)
	$(call KCONFIG_ENABLE_OPT,CONFIG_CGROUPS)
	$(call KCONFIG_ENABLE_OPT,CONFIG_CGROUP_BPF)
	$(call KCONFIG_ENABLE_OPT,CONFIG_CGROUP_SCHED)
	$(call KCONFIG_ENABLE_OPT,CONFIG_CFS_BANDWIDTH)
	$(call KCONFIG_ENABLE_OPT,CONFIG_MEMCG)
	$(call KCONFIG_ENABLE_OPT,CONFIG_CGROUP_PIDS)
	$(call KCONFIG_ENABLE_OPT,CONFIG_CPUSETS)
	$(call KCONFIG_ENABLE_OPT,CONFIG_BLK_CGROUP)
	$(call KCONFIG_ENABLE_OPT,CONFIG_SECCOMP_FILTER)
	$(call KCONFIG_ENABLE_OPT,CONFIG_VETH)
	$(call KCONFIG_ENABLE_OPT,CONFIG_BRIDGE)
	$(call KCONFIG_ENABLE_OPT,CONFIG_BRIDGE_NETFILTER)
	$(call KCONFIG_ENABLE_OPT,CONFIG_NF_CONNTRACK)
	$(call KCONFIG_ENABLE_OPT,CONFIG_NF_NAT)
	$(call KCONFIG_ENABLE_OPT,CONFIG_NF_TABLES)
	$(call KCONFIG_ENABLE_OPT,CONFIG_NFT_NAT)
	$(call KCONFIG_ENABLE_OPT,CONFIG_NFT_MASQ)
	$(call KCONFIG_ENABLE_OPT,CONFIG_NFT_FIB_IPV4)
	$(call KCONFIG_ENABLE_OPT,CONFIG_NF_TABLES_BRIDGE)
	$(call KCONFIG_ENABLE_OPT,CONFIG_NFT_BRIDGE_META)
endef

$(eval $(generic-package))
