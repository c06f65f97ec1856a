//! RuntimeConfig (CRI 2.3, KEP-4033): the cgroup driver that the kubelet must use. SYSTEMD is the zero value of the enum, so
//! the message must always be present.

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_sandbox::cgroup::Driver;

use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn runtime_config(
    daemon: Rc<Daemon>,
    _request: v1::RuntimeConfigRequest,
) -> Result<v1::RuntimeConfigResponse, Error> {
    let cgroup_driver = match daemon.pods.node().placement.driver {
        Driver::Cgroupfs => v1::CgroupDriver::Cgroupfs,
        Driver::Systemd => v1::CgroupDriver::Systemd,
    };
    let cgroup_driver = cgroup_driver.into();
    Ok(v1::RuntimeConfigResponse { linux: Some(v1::LinuxRuntimeConfiguration { cgroup_driver }) })
}
