package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"
	"k8s.io/kubernetes/pkg/kubelet/config"
)

const (
	claimsFile = "dra_manager_state"
	pool       = "bench"
	request    = "widget"
)

// driver is a driver to register.
type driver struct{ Name, Endpoint string }

// claims is the part of a kubelet around the DRA manager, and the API server
// with the claims.
type claims struct {
	manager *dra.Manager
	drivers []string
	logger  klog.Logger

	mu     sync.Mutex
	active map[types.UID]*v1.Pod
	known  map[string]*resourceapi.ResourceClaim
	next   int
}

// writeClaims writes the file of a kubelet with c.Held pods, each with a claim of
// the first driver.
func writeClaims(c command) error {
	checkpointer, err := state.NewCheckpointer(c.Dir, claimsFile)
	if err != nil {
		return err
	}
	list := make(state.ClaimInfoStateList, 0, c.Held)
	for i := range c.Held {
		claim := allocated(i, names(c.Drivers)[:1])
		info := state.ClaimInfoState{
			ClaimUID: claim.UID, ClaimName: claim.Name, Namespace: claim.Namespace,
			PodUIDs: sets.New(string(uid(i))), DriverState: map[string]state.DriverState{},
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			info.DriverState[result.Driver] = state.DriverState{Devices: []state.Device{{
				PoolName: result.Pool, DeviceName: result.Device, RequestNames: []string{request},
				CDIDeviceIDs: []string{result.Driver + "/device=" + result.Device},
			}}}
		}
		list = append(list, info)
	}
	checkpoint, err := state.NewCheckpoint(list)
	if err != nil {
		return err
	}
	return checkpointer.Store(checkpoint)
}

// startClaims starts a DRA manager with its earlier pods, registers the drivers,
// and calls each once.
func startClaims(c command) (*claims, error) {
	n := &claims{
		drivers: names(c.Drivers), logger: klog.Background(), next: c.Held,
		active: map[types.UID]*v1.Pod{}, known: map[string]*resourceapi.ResourceClaim{},
	}
	for i := range c.Held {
		n.active[uid(i)] = &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid(i)}}
	}
	client := fake.NewSimpleClientset()
	// Calls to the API server cost nothing here.
	client.PrependReactor("get", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
		name := action.(clienttesting.GetAction).GetName()
		n.mu.Lock()
		defer n.mu.Unlock()
		if claim, ok := n.known[name]; ok {
			return true, claim, nil
		}
		return true, nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), name)
	})
	ctx := context.Background()
	manager, err := dra.NewManager(n.logger, client, c.Dir)
	if err != nil {
		return nil, err
	}
	n.manager = manager
	getNode := func(context.Context) (*v1.Node, error) {
		return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "bench", UID: "bench"}}, nil
	}
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	if err := manager.Start(ctx, n.activePods, getNode, ready); err != nil {
		return nil, err
	}
	for _, d := range c.Drivers {
		if err := manager.GetWatcherHandler().RegisterPlugin(ctx, d.Name, d.Endpoint, []string{drapb.DRAPluginService}, nil); err != nil {
			return nil, err
		}
	}
	// A new connection rejects calls until it is established.
	deadline := time.Now().Add(10 * time.Second)
	for {
		if _, err = n.pair(n.drivers); err == nil || time.Now().After(deadline) {
			return n, err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// pairs prepares and unprepares pods with one claim of the first driver, one by one.
func (n *claims) pairs(c command) (answer, error) {
	var a answer
	for range c.Count {
		took, err := n.pair(n.drivers[:1])
		if err != nil {
			return a, err
		}
		a.Nanos = append(a.Nanos, took)
	}
	return a, nil
}

// loop runs many callers that prepare and unprepare pods; each pod has a claim of
// all drivers. A kubelet does this in one goroutine per pod.
func (n *claims) loop(c command) (answer, error) {
	began := time.Now()
	end := began.Add(time.Duration(c.Millis) * time.Millisecond)
	var group sync.WaitGroup
	pairs, errs := make([]int, c.Callers), make([]error, c.Callers)
	for i := range c.Callers {
		group.Go(func() {
			for time.Now().Before(end) {
				if _, errs[i] = n.pair(n.drivers); errs[i] != nil {
					return
				}
				pairs[i]++
			}
		})
	}
	group.Wait()
	a := answer{Nanos: []int64{time.Since(began).Nanoseconds()}}
	for _, each := range pairs {
		a.Pairs += each
	}
	return a, errors.Join(errs...)
}

// pair prepares and unprepares a pod. It measures the calls of the DRA manager.
func (n *claims) pair(drivers []string) (int64, error) {
	ctx := context.Background()
	n.mu.Lock()
	i := n.next
	n.next++
	claim, pod := allocated(i, drivers), podWithClaim(i)
	n.known[claim.Name], n.active[pod.UID] = claim, pod
	n.mu.Unlock()
	began := time.Now()
	err := n.manager.PrepareResources(ctx, pod)
	if err == nil {
		var got *dra.ContainerInfo
		if got, err = n.manager.GetResources(pod, &pod.Spec.Containers[0]); err == nil && len(got.CDIDevices) != len(drivers) {
			err = fmt.Errorf("pod %d gets %v", i, got.CDIDevices)
		}
	}
	err = errors.Join(err, n.manager.UnprepareResources(ctx, pod))
	took := time.Since(began).Nanoseconds()
	n.mu.Lock()
	delete(n.known, claim.Name)
	delete(n.active, pod.UID)
	n.mu.Unlock()
	return took, err
}

func (n *claims) activePods() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	pods := make([]*v1.Pod, 0, len(n.active))
	for _, pod := range n.active {
		pods = append(pods, pod)
	}
	return pods
}

func names(drivers []driver) []string {
	list := make([]string, 0, len(drivers))
	for _, d := range drivers {
		list = append(list, d.Name)
	}
	return list
}

func claimUID(i int) types.UID {
	return types.UID(fmt.Sprintf("%08x-2f53-4c1b-8a55-6a0f3b1d0000", i))
}

// allocated returns a claim with a device of each driver, for the pod of the same number.
func allocated(i int, drivers []string) *resourceapi.ResourceClaim {
	allocation := &resourceapi.AllocationResult{}
	for _, name := range drivers {
		allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: request, Driver: name, Pool: pool, Device: claimName(i),
		})
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: claimName(i), Namespace: "default", UID: claimUID(i)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation:  allocation,
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: podName(i), UID: uid(i)}},
		},
	}
}

func claimName(i int) string { return fmt.Sprintf("claim-%d", i) }

func podWithClaim(i int) *v1.Pod {
	name := claimName(i)
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: podName(i), Namespace: "default", UID: uid(i)},
		Spec: v1.PodSpec{
			ResourceClaims: []v1.PodResourceClaim{{Name: "claim", ResourceClaimName: &name}},
			Containers: []v1.Container{{
				Name: "main", Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "claim"}}},
			}},
		},
	}
}
