package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"

	"devlet.test/interop/node"
)

const (
	claimsFile = "dra_manager_state"
	driverName = "drivers.devlet.dev"
)

// handOverClaims tests the hand-over of claims. The driver is the one of
// interop/drivers/bindings.
func handOverClaims(devlet, driver, root string) {
	n, err := node.Start(devlet, root)
	if !results.Check("devlet starts for claims", err) {
		return
	}
	calls, stopDriver, err := startDriver(driver, root)
	if !results.Check("a driver starts", err) {
		return
	}
	defer stopDriver()
	for _, name := range []string{"kept", "dropped"} {
		_, err = n.AdmitFiles(podFile(root, name), claimFile(root, name))
		if !results.Check("devlet admits a pod with the claim "+name, err) {
			return
		}
	}
	if !results.Check("devlet stops with claims", n.Stop()) {
		return
	}

	kubelet, err := state.NewCheckpointer(root, claimsFile)
	if err != nil {
		panic(err)
	}
	list, err := loadClaims(kubelet)
	if !results.Check("the kubelet reads the claims that devlet left", err) {
		return
	}
	kept := claimInfo("kept", "uid-pod-kept")
	results.Check("the kubelet has every claim of devlet", sameClaims(list, kept, claimInfo("dropped", "uid-pod-dropped")))

	// The kubelet runs: one claim is removed, one is added, and one is not prepared yet.
	came, begun := claimInfo("came", stranger), claimInfo("begun", stranger)
	begun.DriverState[driverName] = state.DriverState{}
	checkpoint, err := state.NewCheckpoint(state.ClaimInfoStateList{came, begun, kept})
	if err == nil {
		err = kubelet.Store(checkpoint)
	}
	if !results.Check("the kubelet writes its claims", err) {
		return
	}

	calls.forget()
	if n, err = node.Start(devlet, root); !results.Check("devlet starts after the kubelet, with its claims", err) {
		return
	}
	results.Check("devlet keeps its own claims until an operator decides", hasClaims(n, "dropped", "kept"))
	results.Check("the operator imports the kubelet's claims", adopt(n, root, claimsFile))
	// The claim that the kubelet has unprepared is unprepared once more, and then removed.
	err = node.Until(30*time.Second, func() error { return hasClaims(n, "begun", "came", "kept") })
	results.Check("devlet has the kubelet's claims", err)
	results.Check("a claim that the kubelet unprepared is not prepared again", calls.never("NodePrepareResources", "uid-dropped"))
	_, err = n.Run("remove", stranger)
	results.Check("the kubelet's pod is removed", err)
	results.Check("the kubelet's claims are unprepared", calls.until("NodeUnprepareResources", "uid-came", "uid-begun"))
	results.Check("devlet's claim is not", calls.never("NodeUnprepareResources", "uid-kept"))
	results.Check("devlet stops with claims again", n.Stop())

	list, err = loadClaims(kubelet)
	results.Check("the kubelet reads the claims that devlet left again", err)
	results.Check("the kubelet has the remaining claim", sameClaims(list, kept))
}

// loadClaims reads the file as a kubelet does.
func loadClaims(kubelet state.Checkpointer) (state.ClaimInfoStateList, error) {
	checkpoint, err := kubelet.GetOrCreate()
	if err != nil {
		return nil, err
	}
	return checkpoint.GetClaimInfoStateList()
}

// claimInfo returns the kubelet's record of a prepared claim.
func claimInfo(name, pod string) state.ClaimInfoState {
	return state.ClaimInfoState{
		ClaimUID: types.UID("uid-" + name), ClaimName: name, Namespace: "default", PodUIDs: sets.New(pod),
		DriverState: map[string]state.DriverState{driverName: {Devices: []state.Device{{
			PoolName: "pool", DeviceName: name, CDIDeviceIDs: []string{"interop.devlet.dev/widget=" + name},
		}}}},
	}
}

func sameClaims(got state.ClaimInfoStateList, wanted ...state.ClaimInfoState) error {
	byName := func(a, b state.ClaimInfoState) int { return strings.Compare(a.ClaimName, b.ClaimName) }
	slices.SortFunc(got, byName)
	slices.SortFunc(wanted, byName)
	if !reflect.DeepEqual(got, state.ClaimInfoStateList(wanted)) {
		return fmt.Errorf("they are %+v, not %+v", got, wanted)
	}
	return nil
}

func hasClaims(n *node.Node, wanted ...string) error {
	var all struct{ Claims []struct{ Name string } }
	if err := n.Ask(&all, "get", "claims"); err != nil {
		return err
	}
	var found []string
	for _, claim := range all.Claims {
		found = append(found, claim.Name)
	}
	if !sameSet(found, wanted) {
		return fmt.Errorf("there are %v, not %v", found, wanted)
	}
	return nil
}

func podFile(root, name string) string {
	return write(root, "pod-"+name, fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: default, uid: uid-pod-%s}
spec:
  resourceClaims:
  - {name: device, resourceClaimName: %s}
  containers:
  - name: main
    resources: {claims: [{name: device}]}
`, name, name, name))
}

func claimFile(root, name string) string {
	return write(root, "claim-"+name, fmt.Sprintf(`apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s, namespace: default, uid: uid-%s}
spec:
  devices:
    requests:
    - {name: one, exactly: {deviceClassName: widgets}}
status:
  reservedFor:
  - {resource: pods, name: %s, uid: uid-pod-%s}
  allocation:
    devices:
      results:
      - {request: one, driver: %s, pool: pool, device: %s}
`, name, name, name, name, driverName, name))
}

func write(root, name, text string) string {
	path := filepath.Join(root, name+".yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		panic(err)
	}
	return path
}

// driverCalls are the calls that a driver reports.
type driverCalls struct {
	mu  sync.Mutex
	all []driverCall
}

type driverCall struct {
	Call   string
	Claims []string
}

func startDriver(binary, root string) (*driverCalls, func(), error) {
	cmd := exec.Command(binary, "-root", root, "-driver", driverName)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	// The driver exits when its standard input ends.
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	calls := &driverCalls{}
	go func() {
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var call driverCall
			if json.Unmarshal(lines.Bytes(), &call) == nil {
				calls.mu.Lock()
				calls.all = append(calls.all, call)
				calls.mu.Unlock()
			}
		}
	}()
	return calls, func() {
		stdin.Close()
		cmd.Wait()
	}, nil
}

func (c *driverCalls) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = nil
}

func (c *driverCalls) has(method, claim string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.all, func(call driverCall) bool {
		return strings.HasSuffix(call.Call, "/"+method) && slices.Contains(call.Claims, claim)
	})
}

func (c *driverCalls) never(method, claim string) error {
	if c.has(method, claim) {
		return fmt.Errorf("%s has named %s", method, claim)
	}
	return nil
}

func (c *driverCalls) until(method string, claims ...string) error {
	return node.Until(30*time.Second, func() error {
		for _, claim := range claims {
			if !c.has(method, claim) {
				return fmt.Errorf("%s has not named %s", method, claim)
			}
		}
		return nil
	})
}
