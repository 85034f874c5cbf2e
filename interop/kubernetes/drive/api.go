package main

import (
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// outages tests what devlet does when the API server is away, forgets, or refuses.
var outages = []scenario{
	{name: "api-away-mid-prepare", run: apiAwayMidPrepare, alone: true},
	{name: "api-away-at-start", run: apiAwayAtStart, alone: true},
	{name: "api-paused", run: apiPaused, alone: true},
	{name: "api-connection-silent", run: apiConnectionSilent, long: true},
	{name: "api-missed-deletion", run: apiMissedDeletion, alone: true},
	{name: "api-watch-too-old", run: apiWatchTooOld, alone: true, long: true},
	{name: "api-restored", run: apiRestored, alone: true},
	{name: "api-certificate-replaced", run: apiCertificateReplaced},
	{name: "api-certificate-expired", run: apiCertificateExpired},
	{name: "api-certificate-of-tomorrow", run: apiCertificateOfTomorrow},
	{name: "api-token-replaced", run: apiTokenReplaced, alone: true},
	{name: "api-forbidden", run: apiForbidden, alone: true},
	{name: "api-too-many-requests", run: apiTooManyRequests},
	{name: "api-node-replaced-unseen", run: apiNodeReplacedUnseen},
	{name: "api-pod-replaced-unseen", run: apiPodReplacedUnseen},
}

// outage is the time for which the API server is away.
const outage = 60 * time.Second

// apiAwayMidPrepare kills the API server while a driver prepares a claim.
func apiAwayMidPrepare(t *T) {
	s := newScene(t)
	resource := "example.com/" + t.name
	s.h.plugin(resource, 1)
	held := t.create(pod{name: "held", host: s.h, bound: true, limits: Object{resource: "1"}})
	t.Must("a pod is admitted", s.h.awaitAdmitted(held, soon))
	t.ok(s.peer.command(`fault NodePrepareResources "wait"`))
	first := s.pod("first")
	claim := s.claimUID(first)
	t.Must("the driver is asked to prepare another one", s.peer.awaitAsked("NodePrepareResources", claim))
	t.APIServer.Kill()
	killed := time.Now()
	t.ok(s.peer.command("proceed"))
	t.ok(s.peer.command("fault NodePrepareResources null"))
	t.Check("it is admitted without the API server", s.h.awaitAdmitted(first, soon))
	options, err := s.h.options("first")
	t.Check("devlet prints its options", errors.Join(err, equal("CDI devices", len(options.CDIDevices), 1)))
	t.Check("devlet reports the outage", s.h.awaitError("pods", "", soon))

	// The point of the test: the API server is away for a minute.
	time.Sleep(time.Until(killed.Add(outage)))
	pods, err := s.h.admitted()
	t.Check("no pod is removed meanwhile", errors.Join(err, equal("pods", len(pods), 2)))
	t.Check("no claim is unprepared meanwhile", equal("calls", s.peer.asked("NodeUnprepareResources", claim), 0))
	t.ok(t.APIServer.Start())
	t.Must("the API server returns", t.Ready())
	t.ok(t.Admin.Delete(t.path("pods", "held"), 0))
	returned := time.Now()
	t.Check("a pod that is deleted now is removed", s.h.awaitRemoved(held, soon))
	t.Check("within 15 s", between(time.Since(returned), 0, 15*time.Second))
	pods, err = s.h.admitted()
	t.Check("the other one stays", errors.Join(err, equal("pods", len(pods), 1)))
	slices, err := s.h.slices(s.driver)
	t.Check("the driver's slices stay", errors.Join(err, equal("slices", len(slices), 1)))
}

// apiAwayAtStart restarts devlet while the API server is away.
func apiAwayAtStart(t *T) {
	s := newScene(t)
	resource := "example.com/" + t.name
	plugin := s.h.plugin(resource, 1)
	first := s.pod("first")
	t.Must("devlet admits a pod", s.h.awaitAdmitted(first, soon))
	t.APIServer.Kill()
	s.h.Kill()
	t.Must("devlet is killed and starts again without the API server", s.h.restart())
	t.Check("the pod is still admitted", s.h.awaitAdmitted(first, soon))
	t.Check("its driver connects", node.Until(soon, func() error { return s.h.serving(s.driver) }))
	t.ok(plugin.command("register"))
	_, err := s.h.AdmitFiles(t.write("local.yaml", []byte(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: local, uid: local}
spec: {containers: [{name: main, resources: {limits: {%q: 1}}}]}
`, resource))))
	t.Check("a pod without claims is admitted without the API server", err)
	options, err := s.h.options("first")
	t.Check("devlet prints its options", errors.Join(err, equal("CDI devices", len(options.CDIDevices), 1)))
	t.Check("devlet reports the outage", s.h.awaitError("pods", "", soon))
	t.ok(t.APIServer.Start())
	t.Must("the API server returns", t.Ready())
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Check("devlet follows it again", s.h.awaitRemoved(first, soon))
}

// apiPaused has an API server that accepts connections and does not answer.
func apiPaused(t *T) {
	h := t.host()
	resource := "example.com/" + t.name
	h.serve()
	plugin := h.plugin(resource, 2)
	t.Must("the counts are published", h.counts(resource, "2", "2"))
	t.APIServer.Pause()
	t.ok(plugin.command("health device-1 Unhealthy"))
	t.Check("devlet reports it", h.awaitError("node-status", "no answer", soon))
	t.APIServer.Resume()
	t.Check("the counts are published afterwards", h.counts(resource, "2", "1"))
}

// apiConnectionSilent cuts the connections of devlet's watches, which it cannot notice.
func apiConnectionSilent(t *T) {
	const silence = 150 * time.Second
	h := t.host()
	resource := "example.com/" + t.name
	relay := h.serveBehindRelay()
	h.plugin(resource, 2)
	t.Must("the counts are published", h.counts(resource, "2", "2"))
	relay.Silence()
	silent := time.Now()
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "1"}})
	t.Check("devlet replaces the watch, and admits a pod", h.awaitAdmitted(first, silence+soon))
	t.Check("after 150 s at most", between(time.Since(silent), 0, silence+15*time.Second))
}

// serveBehindRelay starts devlet with connections that can be cut.
func (h *host) serveBehindRelay() *cluster.Relay {
	relay, err := h.t.NewRelay()
	h.t.ok(err)
	h.t.cleanup(relay.Stop)
	kubeconfig, err := h.t.KubeconfigFor(relay.Server, h.user)
	h.t.ok(err)
	h.start("--kubeconfig", kubeconfig, "--node-name", h.name, "--mode", "agent")
	return relay
}

// apiMissedDeletion has devlet miss a deletion that the API server does not remember.
func apiMissedDeletion(t *T) {
	s := newScene(t)
	first := s.pod("first")
	t.Must("devlet admits a pod", s.h.awaitAdmitted(first, soon))
	pause(s.h)
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Must("the API server restarts", t.Restart())
	second := s.pod("second")
	t.Must("the API server restarts again", t.Restart())
	resume(s.h)
	t.Check("devlet removes the pod that was deleted", s.h.awaitRemoved(first, soon))
	t.Check("devlet admits the pod that was created", s.h.awaitAdmitted(second, soon))
}

// apiWatchTooOld has devlet miss a deletion after the regular end of its watch. Then it cannot resume the watch: 410.
func apiWatchTooOld(t *T) {
	// The API server ends a watch of devlet after that time.
	const watch = 290 * time.Second
	s := newScene(t)
	started := time.Now()
	first := s.pod("first")
	t.Must("devlet admits a pod", s.h.awaitAdmitted(first, soon))
	time.Sleep(time.Until(started.Add(watch - 30*time.Second)))
	pause(s.h)
	time.Sleep(time.Until(started.Add(watch + 5*time.Second)))
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Must("the API server restarts", t.Restart())
	second := s.pod("second")
	resume(s.h)
	t.Check("devlet removes the pod that was deleted", s.h.awaitRemoved(first, soon))
	t.Check("devlet admits the pod that was created", s.h.awaitAdmitted(second, soon))
	var expired error
	if !strings.Contains(s.h.Log(), "(410)") {
		expired = errors.New("its log has no 410")
	}
	t.Check("its watch was too old", expired)
}

// apiRestored restores etcd to a revision that is older than what devlet has seen.
func apiRestored(t *T) {
	s := newScene(t)
	resource := "example.com/" + t.name
	s.h.plugin(resource, 4)
	t.ok(s.h.counts(resource, "4", "4"))
	before := t.create(pod{name: "before", host: s.h, bound: true, limits: Object{resource: "1"}})
	t.Must("devlet admits a pod", s.h.awaitAdmitted(before, soon))
	snapshot := filepath.Join(t.dir, "snapshot")
	t.ok(t.Snapshot(snapshot))
	lost := t.create(pod{name: "lost", host: s.h, bound: true, limits: Object{resource: "1"}})
	for i := range 300 {
		_, err := t.Admin.Patch(t.path("pods", "lost"), Object{"metadata": Object{"annotations": Object{"n": fmt.Sprint(i)}}})
		t.ok(err)
	}
	t.Must("devlet admits a newer pod", s.h.awaitAdmitted(lost, soon))
	t.Must("etcd is restored to the time between them", t.Restore(snapshot))
	after := t.create(pod{name: "after", host: s.h, bound: true, limits: Object{resource: "1"}})
	t.Check("devlet admits a pod that is created now", s.h.awaitAdmitted(after, soon))
	t.Check("devlet removes the pod that is lost", s.h.awaitRemoved(lost, soon))
	t.Check("devlet keeps the older pod", s.h.awaitAdmitted(before, soon))
	t.Check("the counts are published", s.h.counts(resource, "4", "4"))
}

func apiCertificateReplaced(t *T) {
	h := t.host()
	resource := "example.com/" + t.name
	const validity = 20 * time.Second
	_, err := t.Node(h.name, validity)
	t.ok(err)
	issued := time.Now()
	h.serve()
	h.plugin(resource, 2)
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "1"}})
	t.Must("devlet admits a pod", h.awaitAdmitted(first, soon))
	_, err = t.Node(h.name, 0)
	t.ok(err)
	// The point of the test: the first certificate is no longer valid.
	time.Sleep(time.Until(issued.Add(validity + time.Second)))
	second := t.create(pod{name: "second", host: h, bound: true, limits: Object{resource: "1"}})
	t.Check("devlet admits a pod with the new certificate", h.awaitAdmitted(second, soon))
}

func apiCertificateExpired(t *T) {
	h := t.host()
	resource := "example.com/" + t.name
	user, err := t.Node(h.name, time.Second)
	t.ok(err)
	api, err := t.Client(user)
	t.ok(err)
	// Watches that devlet opens before are not affected.
	t.Must("its certificate expires", node.Until(soon, func() error {
		_, err := api.Get("/version")
		if !cluster.IsCode(err, 401) {
			return fmt.Errorf("the API server answers with %v", err)
		}
		return nil
	}))
	h.serve()
	h.plugin(resource, 2)
	t.Check("devlet reports that it is not authenticated", h.awaitError("pods", "Unauthorized", soon))
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "1"}})
	_, err = t.Node(h.name, 0)
	t.ok(err)
	t.Check("devlet admits a pod once the certificate is replaced", h.awaitAdmitted(first, late))
}

// apiCertificateOfTomorrow has a serving certificate that is not valid yet, as with a clock that is wrong.
func apiCertificateOfTomorrow(t *T) {
	h := t.host()
	stop, server, err := t.ServeTomorrow()
	t.ok(err)
	t.cleanup(stop)
	path, err := t.KubeconfigFor(server, h.user)
	t.ok(err)
	h.start("--kubeconfig", path, "--node-name", h.name, "--mode", "agent")
	t.Check("devlet says that the certificate is not valid yet", h.awaitError("pods", "not yet valid", soon))
}

// apiTokenReplaced deletes the ServiceAccount and creates it again. Watches that are open are not affected.
func apiTokenReplaced(t *T) {
	h := t.host()
	resource := "example.com/" + t.name
	account := h.account()
	h.serveAs(account)
	plugin := h.plugin(resource, 2)
	t.Must("devlet publishes its devices as a ServiceAccount", h.counts(resource, "2", "2"))
	t.ok(t.Admin.Delete("/api/v1/namespaces/"+accountNamespace+"/serviceaccounts/devlet", -1))
	t.Must("its token is invalid", t.awaitInvalid(account))
	t.ok(plugin.command("health device-1 Unhealthy"))
	t.Check("devlet reports that", h.awaitError("node-status", "Unauthorized", soon))
	h.account()
	t.Check("devlet publishes its devices with a new token", h.counts(resource, "2", "1"))
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "1"}})
	t.Check("and admits a pod", h.awaitAdmitted(first, soon))
}

// apiForbidden lacks a rule of the role.
func apiForbidden(t *T) {
	h := t.host()
	resource := "example.com/" + t.name
	account := h.account()
	t.ok(t.Apply(`
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: devlet-observe}
rules:
- {apiGroups: [""], resources: [nodes], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: devlet-beside-kubelet}
rules: []
`))
	h.serveAs(account)
	h.plugin(resource, 2)
	t.Check("devlet names the missing rule for pods", h.awaitError("pods", "list", soon))
	t.Check("devlet names the missing rule for the node's status", h.awaitError("node-status", "nodes/status", soon))
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "1"}})
	t.roles()
	t.Check("devlet works once the role is complete", h.awaitAdmitted(first, soon))
	t.Check("and publishes its devices", h.counts(resource, "2", "2"))
}

// apiTooManyRequests rejects all requests of the node with 429.
func apiTooManyRequests(t *T) {
	h := t.host()
	resource := "example.com/" + t.name
	h.serve()
	h.plugin(resource, 2)
	t.Must("the counts are published", h.counts(resource, "2", "2"))
	accept := t.reject(h, `{verbs: ["*"], apiGroups: ["*"], resources: ["*"], clusterScope: true, namespaces: ["*"]}`, nodePath(h.name))
	_, err := t.Admin.Patch(nodePath(h.name)+"/status", Object{"status": Object{"capacity": Object{resource: "0"}}})
	t.ok(err)
	h.plugin("example.com/more", 1)
	t.Check("devlet reports it", h.awaitError("node-status", "Too many requests", late))
	accept()
	t.Check("the counts are published afterwards", h.counts(resource, "2", "2"))
}

// apiNodeReplacedUnseen creates the Node again while devlet cannot watch it, so its writes have the UID of the earlier one.
func apiNodeReplacedUnseen(t *T) {
	h := t.host()
	resource := "example.com/" + t.name
	relay := h.serveBehindRelay()
	plugin := h.plugin(resource, 2)
	t.Must("the counts are published", h.counts(resource, "2", "2"))
	accept := t.reject(h, `{verbs: [get, list, watch], apiGroups: [""], resources: [nodes], clusterScope: true}`, nodePath(h.name))
	// devlet then watches again.
	relay.Cut()
	t.Must("devlet cannot watch the Node", h.awaitError("node", "Too many requests", late))
	t.ok(t.Admin.Delete(nodePath(h.name), -1))
	h.createObject()
	t.ok(plugin.command("health device-1 Unhealthy"))
	t.Check("the API server refuses counts for the earlier Node", h.awaitError("node-status", "(422)", late))
	t.Check("the new one has none", h.counts(resource, "", ""))
	accept()
	t.Check("they are published once devlet has seen it", h.counts(resource, "2", "1"))
}

// apiPodReplacedUnseen creates another pod of the same name while devlet cannot watch pods, so health is of the earlier one.
func apiPodReplacedUnseen(t *T) {
	h := t.host()
	resource := "example.com/" + t.name
	relay := h.serveBehindRelay()
	plugin := h.plugin(resource, 1)
	first := t.create(pod{name: "same", host: h, bound: true, limits: Object{resource: "1"}})
	t.Must("devlet admits a pod", h.awaitAdmitted(first, soon))
	t.run(first)
	t.Must("its device is reported as healthy", t.awaitHealth("same", resource, "device-0", "Healthy"))
	accept := t.reject(h, `{verbs: [get, list, watch], apiGroups: [""], resources: [pods], namespaces: ["*"], clusterScope: true}`,
		"/api/v1/pods?"+url.Values{"fieldSelector": {"spec.nodeName=" + h.name}}.Encode())
	// devlet then watches again.
	relay.Cut()
	t.Must("devlet cannot watch pods", h.awaitError("pods", "Too many requests", late))
	t.ok(t.Admin.Delete(t.path("pods", "same"), 0))
	second := t.create(pod{name: "same", host: h, bound: true, limits: Object{resource: "1"}})
	t.run(second)
	t.ok(plugin.command("health device-0 Unhealthy"))
	t.Must("the API server refuses the health of the earlier pod", node.Until(soon, func() error {
		return equal("logged", strings.Contains(h.Log(), "health of devices not written"), true)
	}))
	object, err := t.Admin.Get(t.path("pods", "same"))
	t.Check("the new pod has none", errors.Join(err,
		equal("health", object.Objects("status", "containerStatuses")[0].At("allocatedResourcesStatus"), nil)))
	t.Check("that is not an error", h.awaitSuccess("health"))
	t.ok(plugin.command("health device-0 Healthy"))
	accept()
	t.Check("devlet removes the earlier pod", h.awaitRemoved(first, soon))
	t.Check("and admits the new one", h.awaitAdmitted(second, soon))
	t.Check("with its health", t.awaitHealth("same", resource, "device-0", "Healthy"))
}

// reject has the API server answer those requests of the node with 429 that match a rule, until accept is called. The probe is
// the path of one of them.
func (t *T) reject(h *host, rule, probe string) (accept func()) {
	manifest := fmt.Sprintf(`
apiVersion: flowcontrol.apiserver.k8s.io/v1
kind: PriorityLevelConfiguration
metadata: {name: %[1]s}
spec:
  type: Limited
  limited: {nominalConcurrencyShares: 0, lendablePercent: 0, borrowingLimitPercent: 0, limitResponse: {type: Reject}}
---
apiVersion: flowcontrol.apiserver.k8s.io/v1
kind: FlowSchema
metadata: {name: %[1]s}
spec:
  matchingPrecedence: 2
  priorityLevelConfiguration: {name: %[1]s}
  rules:
  - subjects: [{kind: User, user: {name: "system:node:%[2]s"}}]
    resourceRules:
    - {verbs: [create], apiGroups: [""], resources: [events], namespaces: [default]}
    - %[3]s
`, t.name, h.name, rule)
	t.ok(t.Apply(manifest))
	// One call at a time is accepted, so there must be one.
	release := h.api.Hold("/api/v1/namespaces/default/events")
	accept = func() {
		release()
		t.Kubectl(manifest, "delete", "--ignore-not-found", "-f", "-")
	}
	t.cleanup(accept)
	t.Must("the API server rejects the node", node.Until(soon, func() error {
		_, err := h.api.Get(probe)
		if !cluster.IsCode(err, 429) {
			return fmt.Errorf("it answers with %v", err)
		}
		return nil
	}))
	return accept
}
