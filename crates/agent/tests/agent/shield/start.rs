//! Starts of a kubelet and of devlet.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_that_stays_gets_another_socket_from_the_next_devlet() {
    let node = Node::new();
    let agent = node.devlet().await;
    let kubelet = node.kubelet();
    let _plugin = Plugin::registered(&node.script());
    let first = kubelet.until_healthy(GPU, 3).await.endpoint;
    agent.store().record_lists().await.unwrap();
    agent.stop().await.unwrap();
    drop(agent);

    let agent = node.devlet().await;
    let next = kubelet.until(GPU, |plugin| plugin.endpoint != first).await;

    // The next kubelet finds the socket as it is.
    drop(kubelet);
    let kubelet = node.kubelet();
    let again = kubelet.until_healthy(GPU, 3).await;
    assert_eq!(again.endpoint, next.endpoint);
    agent.stop().await.unwrap();
}
