//! Pods that lose their network while they run, because another program removes their links from the node (`k3s-killall.sh`, a
//! deleted bridge). Such a pod becomes NotReady, so that the kubelet creates a new sandbox, and its network is undone at once: otherwise
//! its host ports would lead to the next pod with its address, if the leases were removed as well.
//!
//! The kernel reports removed links, so an idle node causes no work. Pods of an earlier daemon are checked once.

use std::collections::BTreeSet;
use std::rc::{Rc, Weak};

use coracle_base::{log, reactor};
use coracle_network::lost::{self, Removals};

use crate::Pods;

impl Pods {
    /// Checks the networks of all pods and follows the removal of links from now on. Called once, after the recovery.
    pub fn follow_links(self: &Rc<Self>) {
        reactor::spawn(follow(Rc::downgrade(self))).detach();
    }

    /// Finds pods that have lost their network. `removed`: the links that were removed; `None`: not known.
    fn check_links(&self, removed: Option<&BTreeSet<String>>) {
        let pods: Vec<_> =
            self.table.pods.borrow().values().filter(|pod| pod.is_attached()).cloned().collect();
        let records: Vec<_> = pods.iter().map(|pod| pod.record()).collect();
        let attached: Vec<_> = records
            .iter()
            .filter_map(|record| record.network.as_ref())
            .map(|network| (&network.request, network.result.as_deref().unwrap_or_default()))
            .collect();
        let reasons = match lost::check(&attached, removed) {
            Ok(reasons) => reasons,
            Err(error) => {
                log::warn!("cannot check the networks of pods"; error = error);
                return;
            }
        };
        for (pod, why) in pods.iter().zip(reasons) {
            let (Some(why), pod) = (why, Rc::clone(pod)) else { continue };
            reactor::spawn(async move { pod.lose_network(why).await }).detach();
        }
    }
}

async fn follow(pods: Weak<Pods>) {
    let removals = match Removals::follow() {
        Ok(removals) => removals,
        Err(error) => {
            log::warn!("cannot watch the network interfaces of the node, a pod that loses its interface stays ready"; error = error);
            return;
        }
    };
    let mut removed = None;
    loop {
        let Some(there) = pods.upgrade() else { return };
        there.check_links(removed.as_ref());
        drop(there);
        removed = match removals.next().await {
            Ok(removed) => removed,
            Err(error) => {
                log::warn!("cannot watch the network interfaces of the node any more, a pod that loses its interface stays ready"; error = error);
                return;
            }
        };
    }
}
