// Command kubelet runs the kubelet's own device manager and DRA manager, as of
// the release in go.mod. It reads one command per line on standard input and
// writes one JSON answer per line on standard output. Times are measured in this
// process, around the calls that a kubelet makes, so that the communication with
// this process is not included.
//
// The device manager's directory is a constant: another one must be mounted over
// it.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

const checkpointFile = "kubelet_internal_checkpoint"

// command is a command of the benchmark. Do decides which fields are used.
type command struct {
	Do       string
	Resource string
	// Held is a number of pods, Count one of repetitions or devices.
	Held, Count int
	// IDs are those of the devices that the pods of a checkpoint hold, one each.
	IDs []string
	// Answer is the plugin's answer for each of them.
	Answer  []byte
	Callers int
	Millis  int
	// Dir is the directory of the DRA manager's file; Drivers are the drivers to register.
	Dir     string
	Drivers []driver
}

// answer is the result of a command.
type answer struct {
	Error string `json:"error,omitempty"`
	// Nanos are durations.
	Nanos []int64 `json:"nanos,omitempty"`
	// At is a timestamp of CLOCK_MONOTONIC.
	At int64 `json:"at,omitempty"`
	// Pairs is the number of pairs in the time of Nanos.
	Pairs int `json:"pairs,omitempty"`
}

// node is the part of a kubelet around the device manager.
type node struct {
	manager *devicemanager.ManagerImpl
	logger  klog.Logger
	claims  *claims

	// admission is the lock of a kubelet's sync loop: one pod at a time.
	admission sync.Mutex

	mu     sync.Mutex
	active []*v1.Pod
	next   int
}

func main() {
	n := &node{logger: klog.Background()}
	out := json.NewEncoder(os.Stdout)
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return
		}
		var c command
		if err == nil {
			err = json.Unmarshal(line, &c)
		}
		var a answer
		if err == nil {
			a, err = n.do(c)
		}
		if err != nil {
			a = answer{Error: err.Error()}
		}
		if err := out.Encode(a); err != nil {
			return
		}
	}
}

func (n *node) do(c command) (answer, error) {
	switch c.Do {
	case "write":
		return answer{}, write(c)
	case "start":
		return n.start(c)
	case "capacity":
		return n.capacity(c)
	case "admit":
		return n.admit(c)
	case "forget":
		return answer{}, n.forget(c)
	case "churn":
		return n.churn(c)
	case "loop":
		return n.loop(c)
	case "write-claims":
		return answer{}, writeClaims(c)
	case "start-claims":
		var err error
		n.claims, err = startClaims(c)
		return answer{}, err
	case "claim-pairs":
		return n.claims.pairs(c)
	case "claim-loop":
		return n.claims.loop(c)
	default:
		return answer{}, fmt.Errorf("unknown command %q", c.Do)
	}
}

// write writes the file of a kubelet with c.Held pods.
func write(c command) error {
	manager, err := checkpointmanager.NewCheckpointManager(pluginapi.DevicePluginPath)
	if err != nil {
		return err
	}
	entries := make([]checkpoint.PodDevicesEntry, 0, c.Held)
	for i := range c.Held {
		entries = append(entries, checkpoint.PodDevicesEntry{
			PodUID: string(uid(i)), ContainerName: "main", ResourceName: c.Resource,
			DeviceIDs: checkpoint.DevicesPerNUMA{0: {c.IDs[i]}}, AllocResp: c.Answer,
		})
	}
	return manager.CreateCheckpoint(checkpointFile, checkpoint.New(entries, map[string][]string{c.Resource: c.IDs}))
}

// start starts the device manager with its earlier pods. It measures the start of
// the manager, which reads the file and serves.
func (n *node) start(c command) (answer, error) {
	manager, err := devicemanager.NewManagerImpl(n.logger, nil, noAffinity{})
	if err != nil {
		return answer{}, err
	}
	n.manager, n.next = manager, c.Held
	for i := range c.Held {
		n.active = append(n.active, pod(i, c.Resource))
	}
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	began := time.Now()
	err = manager.Start(n.logger, n.activePods, ready, containermap.NewContainerMap(), sets.New[string]())
	took := time.Since(began).Nanoseconds()
	// Health updates of pods are ignored here.
	go func() {
		for range manager.Updates() {
		}
	}()
	return answer{Nanos: []int64{took}}, err
}

// capacity waits until the node has c.Count devices, and returns the time.
func (n *node) capacity(c command) (answer, error) {
	deadline := time.Now().Add(5 * time.Minute)
	for time.Now().Before(deadline) {
		all, _, _ := n.manager.GetCapacity(n.logger)
		if q := all[v1.ResourceName(c.Resource)]; q.Value() == int64(c.Count) {
			var t unix.Timespec
			err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
			return answer{At: t.Nano()}, err
		}
		time.Sleep(50 * time.Microsecond)
	}
	return answer{}, fmt.Errorf("there are not %d devices of %s", c.Count, c.Resource)
}

// admit admits pods that stay.
func (n *node) admit(c command) (answer, error) {
	var a answer
	for range c.Count {
		_, took, err := n.admitPod(c.Resource)
		if err != nil {
			return a, err
		}
		a.Nanos = append(a.Nanos, took)
	}
	return a, nil
}

// forget removes all pods but the oldest, and cleans up at once.
func (n *node) forget(c command) error {
	n.mu.Lock()
	n.active = append([]*v1.Pod(nil), n.active[:c.Held]...)
	n.mu.Unlock()
	n.manager.UpdateAllocatedDevices(n.logger)
	return nil
}

// churn removes one pod and admits one, repeatedly. It measures the admission, in
// which a kubelet releases the devices of removed pods.
func (n *node) churn(c command) (answer, error) {
	last, _, err := n.admitPod(c.Resource)
	if err != nil {
		return answer{}, err
	}
	var a answer
	for range c.Count {
		n.removePod(last)
		var took int64
		if last, took, err = n.admitPod(c.Resource); err != nil {
			return a, err
		}
		a.Nanos = append(a.Nanos, took)
	}
	n.removePod(last)
	n.manager.UpdateAllocatedDevices(n.logger)
	return a, nil
}

// loop runs many callers that admit and remove pods.
func (n *node) loop(c command) (answer, error) {
	began := time.Now()
	end := began.Add(time.Duration(c.Millis) * time.Millisecond)
	var group sync.WaitGroup
	pairs, errs := make([]int, c.Callers), make([]error, c.Callers)
	for i := range c.Callers {
		group.Go(func() {
			for time.Now().Before(end) {
				pod, _, err := n.admitPod(c.Resource)
				if err != nil {
					errs[i] = err
					return
				}
				n.removePod(pod)
				pairs[i]++
			}
		})
	}
	group.Wait()
	a := answer{Nanos: []int64{time.Since(began).Nanoseconds()}}
	for _, each := range pairs {
		a.Pairs += each
	}
	n.manager.UpdateAllocatedDevices(n.logger)
	return a, errors.Join(errs...)
}

// admitPod admits a new pod with one device, as a kubelet does: the pod is active
// before the device manager is called.
func (n *node) admitPod(resource string) (*v1.Pod, int64, error) {
	n.admission.Lock()
	defer n.admission.Unlock()
	n.mu.Lock()
	pod := pod(n.next, resource)
	n.next++
	n.active = append(n.active, pod)
	n.mu.Unlock()
	began := time.Now()
	err := n.manager.Allocate(context.Background(), pod, &pod.Spec.Containers[0], lifecycle.AddOperation)
	return pod, time.Since(began).Nanoseconds(), err
}

func (n *node) removePod(pod *v1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	kept := make([]*v1.Pod, 0, len(n.active))
	for _, each := range n.active {
		if each != pod {
			kept = append(kept, each)
		}
	}
	n.active = kept
}

func (n *node) activePods() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.active[:len(n.active):len(n.active)]
}

func uid(i int) types.UID {
	return types.UID(fmt.Sprintf("%08x-5b7c-4a7a-9c0e-3f3a8f1f0000", i))
}

func podName(i int) string { return fmt.Sprintf("job-%d", i) }

func pod(i int, name string) *v1.Pod {
	limits := v1.ResourceList{v1.ResourceName(name): *resource.NewQuantity(1, resource.DecimalSI)}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: podName(i), Namespace: "default", UID: uid(i)},
		Spec: v1.PodSpec{Containers: []v1.Container{{
			Name: "main", Resources: v1.ResourceRequirements{Limits: limits, Requests: limits},
		}}},
	}
}

// noAffinity is the topology manager with the policy none.
type noAffinity struct{}

func (noAffinity) GetAffinity(klog.Logger, string, string) topologymanager.TopologyHint {
	return topologymanager.TopologyHint{}
}

func (noAffinity) GetPolicy() topologymanager.Policy { return topologymanager.NewNonePolicy() }

func (noAffinity) Name() string { return "none" }
