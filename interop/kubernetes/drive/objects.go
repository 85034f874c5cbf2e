package main

import (
	"fmt"
	"strconv"
	"time"
)

// class creates a DeviceClass of a driver's devices with the driver's name. The
// extended resource is empty, or one that the class provides.
func (t *T) class(driver, extendedResource string) {
	spec := Object{"selectors": []any{Object{"cel": Object{"expression": fmt.Sprintf("device.driver == %q", driver)}}}}
	if extendedResource != "" {
		spec["extendedResourceName"] = extendedResource
	}
	const collection = "/apis/resource.k8s.io/v1/deviceclasses"
	_, err := t.Admin.Create(collection, Object{"metadata": Object{"name": driver}, "spec": spec})
	t.ok(err)
	t.cleanup(func() { t.Admin.Delete(collection+"/"+driver, -1) })
}

// claimSpec requests a number of devices of a class.
func claimSpec(class string, count int) Object {
	return Object{"devices": Object{"requests": []any{Object{
		"name": "device", "exactly": Object{"deviceClassName": class, "count": count},
	}}}}
}

// template creates a ResourceClaimTemplate.
func (t *T) template(name, class string, count int) {
	_, err := t.Admin.Create(t.path("resourceclaimtemplates"), Object{
		"metadata": Object{"name": name}, "spec": Object{"spec": claimSpec(class, count)},
	})
	t.ok(err)
}

// claim creates a ResourceClaim.
func (t *T) claim(name, class string, count int) {
	_, err := t.Admin.Create(t.path("resourceclaims"), Object{
		"metadata": Object{"name": name}, "spec": claimSpec(class, count),
	})
	t.ok(err)
}

// pod describes a pod with one container.
type pod struct {
	name string
	// host is the node of the pod; the scheduler binds it.
	host *host
	// template or claim is the only claim of the pod; limits are its extended resources.
	template, claim string
	limits          Object
	// grace is its termination grace period in seconds.
	grace int
	// bound pods do not wait for the scheduler.
	bound bool
	// unscheduled pods are left alone by the scheduler.
	unscheduled bool
}

// create creates a pod and returns its object.
func (t *T) create(p pod) Object {
	container := Object{"name": "main", "image": "none"}
	resources := Object{}
	spec := Object{
		"containers":                    []any{container},
		"terminationGracePeriodSeconds": p.grace,
		"nodeSelector":                  Object{"kubernetes.io/hostname": p.host.name},
	}
	if p.bound {
		spec["nodeName"] = p.host.name
	}
	if p.unscheduled {
		spec["schedulerName"] = "none"
	}
	if p.limits != nil {
		resources["limits"] = p.limits
	}
	if p.template != "" || p.claim != "" {
		resources["claims"] = []any{Object{"name": "device"}}
		claim := Object{"name": "device"}
		if p.template != "" {
			claim["resourceClaimTemplateName"] = p.template
		} else {
			claim["resourceClaimName"] = p.claim
		}
		spec["resourceClaims"] = []any{claim}
	}
	container["resources"] = resources
	created, err := t.Admin.Create(t.path("pods"), Object{"metadata": Object{"name": p.name}, "spec": spec})
	t.ok(err)
	return created
}

// scheduled waits until the scheduler has bound a pod, and returns the pod.
func (t *T) scheduled(name string) Object {
	bound, err := t.Admin.Await(t.path("pods", name), soon, func(pod Object) error {
		if pod.Text("spec", "nodeName") == "" {
			return fmt.Errorf("it is not scheduled: %v", pod.At("status"))
		}
		return nil
	})
	t.Must(name+" is scheduled", err)
	return bound
}

// claimOf returns the name of the claim that was made for a pod.
func (t *T) claimOf(pod Object) string {
	for _, status := range pod.Objects("status", "resourceClaimStatuses") {
		return status.Text("resourceClaimName")
	}
	return pod.Text("status", "extendedResourceClaimStatus", "resourceClaimName")
}

// awaitPhase waits for a pod's phase.
func (t *T) awaitPhase(pod, phase string, timeout time.Duration) error {
	_, err := t.Admin.Await(t.path("pods", pod), timeout, func(o Object) error {
		return equal("phase", o.Text("status", "phase"), phase)
	})
	return err
}

// revision returns the resource version of an object as a number.
func revision(o Object) int {
	number, _ := strconv.Atoi(o.Text("metadata", "resourceVersion"))
	return number
}

// run sets the status that a node agent gives a pod whose container runs.
func (t *T) run(pod Object) {
	t.setState(pod, true, Object{"running": Object{"startedAt": "2026-01-01T00:00:00Z"}})
}

// end sets the status of a pod whose container has ended.
func (t *T) end(pod Object) { t.setState(pod, false, Object{"terminated": Object{"exitCode": 0}}) }

func (t *T) setState(pod Object, isRunning bool, state Object) {
	_, err := t.Admin.Patch(t.path("pods", pod.Name(), "status"), Object{"status": Object{
		"phase": "Running",
		"containerStatuses": []any{Object{
			"name": "main", "image": "none", "imageID": "none", "restartCount": 0,
			"ready": isRunning, "started": isRunning, "state": state,
		}},
	}})
	t.ok(err)
}
