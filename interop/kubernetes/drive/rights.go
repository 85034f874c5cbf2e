package main

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// rights compares the permissions of docs/kubernetes.md with those that the API server grants.
var (
	rights = []scenario{
		{name: "rights-of-node", run: rightsOfNode},
	}
	accountRights = []scenario{
		{name: "rights-of-account", run: rightsOfAccount, alone: true},
		{name: "rights-beside-kubelet", run: rightsBesideKubelet, alone: true},
		{name: "rights-of-observer", run: rightsOfObserver, alone: true},
		{name: "rights-of-settings", run: rightsOfSettings, alone: true},
	}
)

const leaseCollection = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"

// account returns the ServiceAccount of packaging/kubernetes, with a token bound to the node.
func (h *host) account() cluster.User {
	h.t.roles()
	user, err := h.t.ServiceAccountToken(accountNamespace, "devlet", time.Hour, h.object())
	h.t.ok(err)
	return user
}

// accountNamespace is that of the ServiceAccount in packaging/kubernetes.
const accountNamespace = "devlet"

// roles creates the ServiceAccount, its policy, and all its roles.
func (t *T) roles() {
	for _, file := range []string{"namespace.yaml", "rbac.yaml"} {
		manifest, err := os.ReadFile("packaging/kubernetes/" + file)
		t.ok(err)
		t.ok(t.Apply(string(manifest)))
	}
	t.ok(t.Apply(binding("devlet-agent")))
}

// binding gives the ServiceAccount a role.
func binding(role string) string {
	return fmt.Sprintf(`
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: %[1]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: %[1]s}
subjects: [{kind: ServiceAccount, name: devlet, namespace: %[2]s}]
`, role, accountNamespace)
}

// unbind takes roles from the ServiceAccount, and waits until the API server knows.
func (t *T) unbind(api *cluster.Client, roles ...string) {
	for _, role := range roles {
		t.ok(t.Admin.Delete("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/"+role, -1))
	}
	t.Must("the rights are taken away", node.Until(soon, func() error {
		_, deleted := api.Call("DELETE", sliceCollection+"?fieldSelector=spec.nodeName%3Dabsent", "", nil)
		if len(roles) == 1 {
			return forbidden(deleted)
		}
		_, err := api.Patch(nodePath("absent")+"/status", Object{})
		return errors.Join(forbidden(deleted), forbidden(err))
	}))
}

// rightsScene has objects of a node and of another one.
type rightsScene struct {
	*T
	mine, other *host
	driver      string
	// ours and theirs are pods with an allocated claim each, on the two nodes; late is another one on ours.
	ours, theirs, late Object
}

func newRightsScene(t *T) *rightsScene {
	s := &rightsScene{T: t, mine: t.host(), other: t.hostNamed(t.name + "-other"), driver: t.name + ".example.com"}
	t.class(s.driver, "")
	t.template("one", s.driver, 1)
	s.mine.publish(s.driver, "device-0")
	s.other.publish(s.driver, "device-0")
	t.create(pod{name: "ours", host: s.mine, template: "one"})
	t.create(pod{name: "theirs", host: s.other, template: "one"})
	s.late = t.create(pod{name: "late", host: s.mine, bound: true})
	s.ours, s.theirs = t.scheduled("ours"), t.scheduled("theirs")
	return s
}

func rightsOfNode(t *T) {
	s := newRightsScene(t)
	s.check(s.mine.api, map[string]bool{
		"get the own node":                      true,
		"list the own node by name":             true,
		"watch the own node by name":            true,
		"get another node":                      false,
		"patch the status of the own node":      true,
		"patch the status of another node":      false,
		"get the status of the own node":        false,
		"list pods of the own node":             true,
		"watch pods of the own node":            true,
		"list all pods":                         false,
		"patch the status of an own pod":        true,
		"patch the labels of an own pod":        false,
		"patch the claims of an own pod":        false,
		"patch the status of another pod":       false,
		"get the claim of an own pod":           true,
		"get the claim of another pod":          false,
		"list claims":                           false,
		"patch the devices of a claim's status": false,
		"list slices of the own node":           true,
		"watch slices of the own node":          true,
		"list all slices":                       false,
		"delete slices of all nodes":            false,
		"delete slices of the own node":         true,
		"create an event":                       true,
		"patch an event":                        true,
		"create a DeviceTaintRule":              false,
		"create the lease of the own node":      true,
		"patch the lease of the own node":       true,
		"create the lease of another node":      false,
		"evict an own pod":                      true,
		"evict another pod":                     false,
		"delete another pod":                    false,
		"delete an own pod":                     true,
	})
	object := s.mine.object()
	t.ok(t.Admin.Delete(nodePath(s.mine.name), -1))
	_, err := s.mine.api.Create("/api/v1/nodes", Object{"metadata": Object{"name": s.mine.name}})
	t.Check("create the own node: allowed", err)
	if err == nil && s.mine.object().UID() == object.UID() {
		t.Check("the node is a new one", errors.New("it has the old UID"))
	}
}

func rightsOfAccount(t *T) {
	s := newRightsScene(t)
	api, err := t.Client(s.mine.account())
	t.ok(err)
	t.Must("the API server restricts it to its node", node.Until(soon, func() error {
		_, err := api.Patch(nodePath(s.other.name)+"/status", Object{"status": Object{"capacity": Object{"example.com/a": "1"}}})
		return forbidden(err)
	}))
	if t.minor() >= 36 {
		s.refuseClaimsOfOthers(api)
	}
	s.check(api, map[string]bool{
		"get the own node":                      true,
		"list the own node by name":             true,
		"watch the own node by name":            true,
		"get another node":                      true,
		"patch the status of the own node":      true,
		"patch the status of another node":      false,
		"list pods of the own node":             true,
		"watch pods of the own node":            true,
		"list all pods":                         true,
		"patch the status of an own pod":        true,
		"patch the status of another pod":       false,
		"get the claim of an own pod":           true,
		"get the claim of another pod":          true,
		"list claims":                           false,
		"patch the devices of a claim's status": true,
		"list slices of the own node":           true,
		"watch slices of the own node":          true,
		"list all slices":                       true,
		"delete slices of all nodes":            false,
		"delete slices of the own node":         true,
		"create an event":                       true,
		"patch an event":                        true,
		"create a DeviceTaintRule":              false,
		"create a node":                         false,
		"create the lease of the own node":      false,
		"create the lease of another node":      false,
		"evict an own pod":                      false,
		"evict another pod":                     false,
		"delete another pod":                    false,
		"delete an own pod":                     true,
	})
}

// refuseClaimsOfOthers checks that the devices of a claim on another node cannot be written.
func (s *rightsScene) refuseClaimsOfOthers(api *cluster.Client) {
	path, patch := s.path("resourceclaims", s.claimOf(s.theirs), "status"), s.claimDevices(s.theirs)
	_, err := api.Patch(path, patch)
	s.Check("patch the devices of a claim of another node: refused", refused(err, "arbitrary-node:patch"))
	unbound, err := s.ServiceAccountToken(accountNamespace, "devlet", time.Hour, nil)
	s.ok(err)
	api, err = s.Client(unbound)
	s.ok(err)
	_, err = api.Patch(path, patch)
	s.Check("patch the devices of a claim with a token of no node: refused", refused(err, "arbitrary-node:patch"))
}

// rightsBesideKubelet has the roles that packaging/kubernetes binds.
func rightsBesideKubelet(t *T) {
	s := newRightsScene(t)
	api, err := t.Client(s.mine.account())
	t.ok(err)
	t.unbind(api, "devlet-agent")
	s.check(api, map[string]bool{
		"get the own node":                      true,
		"watch the own node by name":            true,
		"patch the status of the own node":      true,
		"watch pods of the own node":            true,
		"patch the status of an own pod":        true,
		"patch the devices of a claim's status": false,
		"watch slices of the own node":          true,
		"delete slices of the own node":         false,
		"create an event":                       true,
		"patch an event":                        true,
		"evict an own pod":                      false,
		"delete an own pod":                     false,
	})
}

// rightsOfObserver lacks the roles of the mode agent.
func rightsOfObserver(t *T) {
	s := newRightsScene(t)
	api, err := t.Client(s.mine.account())
	t.ok(err)
	t.unbind(api, "devlet-agent", "devlet-beside-kubelet")
	s.check(api, map[string]bool{
		"get the own node":                      true,
		"watch the own node by name":            true,
		"patch the status of the own node":      false,
		"list pods of the own node":             true,
		"watch pods of the own node":            true,
		"patch the status of an own pod":        false,
		"get the claim of an own pod":           true,
		"patch the devices of a claim's status": false,
		"list slices of the own node":           true,
		"watch slices of the own node":          true,
		"delete slices of the own node":         false,
		"create an event":                       false,
		"evict an own pod":                      false,
		"delete an own pod":                     false,
	})
}

// rightsOfSettings adds the rules that some settings need.
func rightsOfSettings(t *T) {
	s := newRightsScene(t)
	user := s.mine.account()
	t.ok(t.Apply(`
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: devlet-settings}
rules:
- {apiGroups: [""], resources: [nodes], verbs: [create]}
- {apiGroups: [""], resources: [pods/eviction], verbs: [create]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: devlet-settings}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: devlet-settings}
subjects: [{kind: ServiceAccount, name: devlet, namespace: devlet}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: devlet-settings, namespace: kube-node-lease}
rules: [{apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create, patch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: devlet-settings, namespace: kube-node-lease}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: devlet-settings}
subjects: [{kind: ServiceAccount, name: devlet, namespace: devlet}]
`))
	api, err := t.Client(user)
	t.ok(err)
	s.check(api, map[string]bool{
		"create a node":                    true,
		"create the lease of the own node": true,
		"patch the lease of the own node":  true,
		"evict an own pod":                 true,
	})
	s.mine.serveAs(user, t.config("heartbeat: true")...)
	t.ok(t.Admin.Delete(nodePath(s.mine.name), -1))
	_, err = t.Admin.Await(nodePath(s.mine.name), soon, cluster.Exists)
	t.Check("devlet creates the Node with them", err)
}

// call is a call in the table of rights.
type call struct {
	name string
	make func(api *cluster.Client) error
}

// calls returns all calls, those that delete objects last.
func (s *rightsScene) calls() []call {
	mine, t := s.mine.name, s.T
	patch := func(path string, body Object) func(*cluster.Client) error {
		return func(api *cluster.Client) error { _, err := api.Patch(path, body); return err }
	}
	list := func(collection string, selector string) func(*cluster.Client) error {
		return func(api *cluster.Client) error {
			_, _, err := api.List(collection, url.Values{"fieldSelector": {selector}})
			return err
		}
	}
	watch := func(collection string, selector string) func(*cluster.Client) error {
		return func(api *cluster.Client) error {
			return api.WatchOnce(collection, url.Values{"fieldSelector": {selector}})
		}
	}
	get := func(path string) func(*cluster.Client) error {
		return func(api *cluster.Client) error { _, err := api.Get(path); return err }
	}
	capacity := Object{"status": Object{"capacity": Object{"example.com/a": "1"}}}
	labels := Object{"metadata": Object{"labels": Object{"a": "b"}}}
	claims := Object{"status": Object{"resourceClaimStatuses": []any{}}}
	condition := Object{"status": Object{"conditions": []any{Object{"type": "devlet.dev/DevicesHealthy", "status": "True"}}}}
	event := Object{
		"metadata":       Object{"name": "rights", "namespace": t.name},
		"involvedObject": Object{"kind": "Pod", "namespace": t.name, "name": "ours", "uid": s.ours.UID()},
		"reason":         "Test", "message": "a test", "type": "Normal", "count": 1,
	}
	remove := func(pod Object) func(*cluster.Client) error {
		return func(api *cluster.Client) error {
			_, err := api.Call("DELETE", t.path("pods", pod.Name()), "application/json",
				Object{"gracePeriodSeconds": 0, "preconditions": Object{"uid": pod.UID()}})
			return err
		}
	}
	lease := func(node string) func(*cluster.Client) error {
		return func(api *cluster.Client) error {
			_, err := api.Create(leaseCollection, Object{
				"metadata": Object{"name": node}, "spec": Object{"holderIdentity": node, "leaseDurationSeconds": 40},
			})
			return err
		}
	}
	evict := func(pod Object) func(*cluster.Client) error {
		return func(api *cluster.Client) error {
			_, err := api.Create(t.path("pods", pod.Name(), "eviction"), Object{
				"apiVersion": "policy/v1", "kind": "Eviction", "metadata": Object{"name": pod.Name(), "namespace": t.name},
			})
			return err
		}
	}
	wipe := func(selector string) func(*cluster.Client) error {
		return func(api *cluster.Client) error {
			_, err := api.Call("DELETE", sliceCollection+"?"+url.Values{"fieldSelector": {selector}}.Encode(), "", nil)
			return err
		}
	}
	return []call{
		{"get the own node", get(nodePath(mine))},
		{"list the own node by name", list("/api/v1/nodes", "metadata.name="+mine)},
		{"watch the own node by name", watch("/api/v1/nodes", "metadata.name="+mine)},
		{"get another node", get(nodePath(s.other.name))},
		{"patch the status of the own node", patch(nodePath(mine)+"/status", capacity)},
		{"get the status of the own node", get(nodePath(mine) + "/status")},
		{"patch the status of another node", patch(nodePath(s.other.name)+"/status", capacity)},
		{"list pods of the own node", list("/api/v1/pods", "spec.nodeName="+mine)},
		{"watch pods of the own node", watch("/api/v1/pods", "spec.nodeName="+mine)},
		{"list all pods", get("/api/v1/pods")},
		{"patch the status of an own pod", patch(t.path("pods", "ours", "status"), condition)},
		{"patch the labels of an own pod", patch(t.path("pods", "ours", "status"), labels)},
		{"patch the claims of an own pod", patch(t.path("pods", "ours", "status"), claims)},
		{"patch the status of another pod", patch(t.path("pods", "theirs", "status"), condition)},
		{"get the claim of an own pod", get(t.path("resourceclaims", t.claimOf(s.ours)))},
		{"get the claim of another pod", get(t.path("resourceclaims", t.claimOf(s.theirs)))},
		{"list claims", get(t.path("resourceclaims"))},
		{"patch the devices of a claim's status", patch(t.path("resourceclaims", t.claimOf(s.ours), "status"), s.claimDevices(s.ours))},
		{"list slices of the own node", list(sliceCollection, "spec.nodeName="+mine)},
		{"watch slices of the own node", watch(sliceCollection, "spec.nodeName="+mine)},
		{"list all slices", get(sliceCollection)},
		{"create an event", func(api *cluster.Client) error { _, err := api.Create(t.path("events"), event); return err }},
		{"patch an event", patch(t.path("events", "rights"), Object{"count": 2})},
		{"create a DeviceTaintRule", func(api *cluster.Client) error {
			_, err := api.Create("/apis/resource.k8s.io/v1/devicetaintrules", Object{"metadata": Object{"name": t.name}})
			return err
		}},
		{"create a node", func(api *cluster.Client) error {
			_, err := api.Create("/api/v1/nodes", Object{"metadata": Object{"name": t.name + "-new"}})
			return err
		}},
		{"create the lease of the own node", lease(mine)},
		{"patch the lease of the own node", patch(leaseCollection+"/"+mine, Object{"spec": Object{"leaseDurationSeconds": 41}})},
		{"create the lease of another node", lease(s.other.name)},
		{"evict another pod", evict(s.theirs)},
		{"delete slices of all nodes", wipe("spec.driver=" + s.driver)},
		{"delete slices of the own node", wipe("spec.nodeName=" + mine + ",spec.driver=" + s.driver)},
		{"delete another pod", remove(s.theirs)},
		{"delete an own pod", remove(s.ours)},
		{"evict an own pod", evict(s.late)},
	}
}

// check makes the calls for which an expectation exists, and compares the answers.
func (s *rightsScene) check(api *cluster.Client, allowed map[string]bool) {
	for _, call := range s.calls() {
		expected, ok := allowed[call.name]
		if !ok {
			continue
		}
		delete(allowed, call.name)
		err := call.make(api)
		if expected {
			s.Check(call.name+": allowed", err)
		} else {
			s.Check(call.name+": refused", forbidden(err))
		}
	}
	s.Check("all expectations are used", equal("unknown calls", allowed, map[string]bool{}))
	left, err := s.other.slices(s.driver)
	s.ok(err)
	s.Check("slices of other nodes are left", equal("slices", len(left), 1))
}

// claimDevices is a patch with the device of a pod's claim.
func (s *rightsScene) claimDevices(pod Object) Object {
	return Object{"status": Object{"devices": []any{Object{
		"driver": s.driver, "pool": pod.Text("spec", "nodeName"), "device": "device-0",
		"conditions": []any{Object{
			"type": "Ready", "status": "True", "reason": "Test", "message": "",
			"lastTransitionTime": time.Now().UTC().Format(time.RFC3339),
		}},
	}}}}
}

// minor returns the minor version of the API server.
func (t *T) minor() int {
	version, err := t.Admin.Get("/version")
	t.ok(err)
	var minor int
	_, err = fmt.Sscan(version.Text("minor"), &minor)
	t.ok(err)
	return minor
}
