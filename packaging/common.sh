# Functions of the scripts of all package formats. `packaging/script` puts them into each script that has the line
# `. ../common.sh`, since a package's script is one file.

# Writes crictl's configuration where there is none.
configure_crictl() {
	if [ ! -e /etc/crictl.yaml ]; then
		install -m 0644 /usr/share/coracle/crictl.yaml /etc/crictl.yaml
	fi
}

# Removes crictl's configuration, if it is still that of the package.
forget_crictl() {
	if grep -qs '^# From the package coracle' /etc/crictl.yaml; then
		rm -f /etc/crictl.yaml
	fi
}

# Removes the pods with crictl, if it is installed and the daemon runs.
remove_pods() {
	if [ -S /run/coracle/coracle.sock ] && command -v crictl >/dev/null; then
		crictl --runtime-endpoint unix:///run/coracle/coracle.sock rmp --all --force >/dev/null ||
			echo "coracle: some pods could not be removed" >&2
	fi
}

# Says that pods are left, after the daemon has been stopped.
warn_of_pods() {
	if [ -n "$(ls -A /run/coracle/pods 2>/dev/null)" ]; then
		echo "coracle: pods run on, without a daemon, until this machine reboots" >&2
	fi
}

# Removes the state directory unless pods are left: without them nothing in there is worth keeping.
clear_state() {
	if [ -z "$(ls -A /run/coracle/pods 2>/dev/null)" ]; then
		rm -rf /run/coracle
	fi
}
