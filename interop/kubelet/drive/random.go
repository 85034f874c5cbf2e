package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"syscall"
	"time"

	"devlet.test/interop/node"
)

// faultRuns is the scenario of random faults.
var faultRuns = []scenario{
	{name: "random", run: random, bare: true, shield: true, slow: true},
}

// faultRun is a run of random faults on a node.
type faultRun struct {
	t       *T
	random  *rand.Rand
	plugins []*plugin
	all     []part
	// down are the parts that do not run on purpose.
	down   []string
	pods   int
	counts map[string]int
}

// random does random things to the node for --duration. It is judged by open
// descriptors all the time, and at the end each pod must run.
func random(t *T) {
	r := &faultRun{t: t, random: rand.New(rand.NewPCG(*seed, 0)), counts: map[string]int{}}
	fmt.Printf("%s: seed %d\n", t.name, *seed)
	r.plugins = []*plugin{t.plugin("left", 4), t.plugin("right", 3, "--prestart", "--preferred")}
	for _, p := range r.plugins {
		r.all = append(r.all, part{p.kind, p.Process})
	}
	r.all = append(r.all, part{"kubelet", t.m.kubelet}, part{"containerd", t.m.containerd})
	if t.m.shield {
		r.all = append(r.all, part{"devlet", t.m.devlet})
	}

	stop := watch()
	for deadline := time.Now().Add(*duration); time.Now().Before(deadline); {
		r.step()
		r.supervise()
		time.Sleep(time.Duration(r.random.IntN(1500)) * time.Millisecond)
	}
	for _, part := range r.all {
		part.process.Resume()
	}
	r.down = nil
	for _, p := range r.plugins {
		p.script()
	}
	r.supervise()
	fmt.Printf("%s: done: %v\n", t.name, r.counts)

	rejected := 0
	err := node.Until(late, func() error {
		r.supervise()
		pods, _, err := t.m.cluster.Admin.List(podsPath, url.Values{})
		if err != nil {
			return err
		}
		rejected = 0
		var failed error
		all := instances()
		for _, pod := range pods {
			if pod.Text("spec", "nodeName") == "" {
				// There are too few devices for it.
				continue
			}
			if pod.Text("status", "phase") == "Failed" {
				rejected++
			} else if _, err := held(all, pod.Name(), "main"); err != nil {
				failed = errors.Join(failed, fmt.Errorf("%w: %s", err, describe(pod)))
			}
		}
		if failed != nil {
			// Each try is a list of all pods.
			time.Sleep(time.Second)
		}
		return failed
	})
	t.Check("at the end, each pod that is not failed holds its devices", err)
	fmt.Printf("%s: %d of %d pods were failed at the end\n", t.name, rejected, r.pods)
	found := stop()
	if t.m.shield {
		t.Check("no device was open twice, and no container ran without one", none(found))
	}
	t.measured(fmt.Sprintf("random faults for %v: failed pods, and violations", *duration), "%d, %d", rejected, len(found))
}

// step does one random thing.
func (r *faultRun) step() {
	t := r.t
	chosen := r.all[r.random.IntN(len(r.all))]
	p := r.plugins[r.random.IntN(len(r.plugins))]
	action := ""
	switch n := r.random.IntN(100); {
	case n < 30:
		action = "create"
		wants := map[string]int{p.kind: 1 + r.random.IntN(2)}
		if r.random.IntN(3) == 0 {
			wants = map[string]int{"left": 1, "right": 1}
		}
		r.pods++
		p := pod{name: fmt.Sprintf("random-%d", r.pods), wants: wants, scheduled: true, grace: r.random.IntN(3)}
		switch r.random.IntN(6) {
		case 0:
			// Its devices are those of `main` afterwards.
			p.init = []container{{"prepare", wants}}
		case 1:
			p.sidecars = []container{{"sidecar", map[string]int{"left": 1}}}
		case 2:
			p.containers = []container{{"beside", map[string]int{"right": 1}}}
		}
		t.create(p)
	case n < 48:
		if pods, _, err := t.m.cluster.Admin.List(podsPath, url.Values{}); err == nil && len(pods) > 2 {
			action = "delete"
			grace := -1
			if r.random.IntN(2) == 0 {
				action, grace = "force delete", 0
			}
			t.m.cluster.Admin.Delete(podPath(pods[r.random.IntN(len(pods))].Name()), grace)
		}
	case n < 56:
		if running := instances(); len(running) > 0 {
			action = "kill a container"
			syscall.Kill(running[r.random.IntN(len(running))].pid, syscall.SIGKILL)
		}
	case n < 70:
		call := faulty[r.random.IntN(len(faulty))].call
		fault := []string{"hang", "refuse", "die", "slow 1s", "slow 5s"}[r.random.IntN(5)]
		action = "script"
		p.script(call + " " + fault)
	case n < 78:
		action = "heal"
		p.script()
	case n < 86:
		action = "kill " + chosen.name
		chosen.process.Kill()
	case n < 90:
		action = "stop " + chosen.name
		chosen.process.Kill()
		r.down = append(r.down, chosen.name)
	case n < 95:
		action = "start"
		r.down = nil
	case n < 98:
		action = "pause " + chosen.name
		chosen.process.Pause()
	default:
		action = "resume"
		for _, part := range r.all {
			part.process.Resume()
		}
	}
	if action != "" {
		r.counts[action]++
	}
}

// supervise starts parts again that ended, as their services would be.
func (r *faultRun) supervise() {
	for _, part := range r.all {
		if part.process.Running() != nil && !slices.Contains(r.down, part.name) {
			r.t.ok(part.process.Start())
		}
	}
}
