// Command drive tests devlet as a part of a node of a real Kubernetes control
// plane. ../README.md describes its flags.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"syscall"

	"devlet.test/interop/node"
)

// scenario is a named test.
type scenario struct {
	name string
	run  func(*T)
	// alone: it damages the control plane, or changes roles, so it gets one of its own.
	alone bool
	// long: it waits for minutes.
	long bool
}

// scenarios start in this order.
var scenarios = slices.Concat(
	foundation, rights, manifests, accountRights, pods, claims, accountClaims, nodes, wiping, outages, inCluster, health, settings, crashes)

var (
	devlet      = flag.String("devlet", "", "the built devlet")
	testkit     = flag.String("testkit", "", "the example testkit-plugin of crates/testkit")
	programs    = flag.String("programs", "", "the directory that build prints")
	pattern     = flag.String("run", "", "run only scenarios whose names match this regular expression")
	long        = flag.Bool("long", false, "also run the scenarios that wait for minutes")
	list        = flag.Bool("list", false, "print the names of the scenarios")
	up          = flag.String("up", "", "only start a control plane with a node of this name, and wait for a signal")
	parallel    = flag.Int("parallel", 4, "run this number of scenarios at the same time: most of them wait most of the time")
	latencyFile = flag.String("latency", "", "only measure how long the admission of pods takes, and write that to a file")
	samples     = flag.Int("samples", 100, "with --latency: the number of pods of each kind")
	keep        = flag.Bool("keep", false, "keep all files of the run")
)

// results is locked while a result is printed and counted.
var results struct {
	sync.Mutex
	node.Results
}

func main() {
	flag.Parse()
	names := regexp.MustCompile(*pattern)
	chosen := slices.DeleteFunc(slices.Clone(scenarios), func(s scenario) bool {
		return !names.MatchString(s.name) || s.long && !*long
	})
	if *list {
		for _, s := range chosen {
			fmt.Println(s.name)
		}
		return
	}
	// The paths of sockets below it must be short.
	dir, err := os.MkdirTemp("", "dk")
	if err != nil {
		panic(err)
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		<-signals
		os.RemoveAll(dir)
		os.Exit(130)
	}()

	if *latencyFile != "" {
		t := &T{name: "latency", dir: filepath.Join(dir, "latency")}
		t.scenario(measure, true)
		os.RemoveAll(dir)
		results.End()
		return
	}
	if *up != "" {
		t := &T{name: *up, dir: dir}
		t.scenario(stay, true)
		results.End()
	}
	queue := make(chan scenario)
	var workers sync.WaitGroup
	for range *parallel {
		workers.Go(func() {
			for s := range queue {
				t := &T{name: s.name, dir: filepath.Join(dir, s.name)}
				t.scenario(s.run, s.alone)
			}
		})
	}
	for _, s := range chosen {
		queue <- s
	}
	close(queue)
	workers.Wait()
	if shared.Cluster != nil {
		shared.Stop()
	}
	if results.Failed() > 0 || *keep {
		fmt.Println("logs and files are in", dir)
	} else {
		os.RemoveAll(dir)
	}
	results.End()
}

// stay prints the files to use the control plane with, and waits for a signal.
func stay(t *T) {
	h := t.host()
	fmt.Printf("API server         %s\nadministrator      %s\nnode %-13s %s\nlogs               %s\n",
		t.Server, t.AdminConfig, h.name, h.kubeconfig, t.Dir)
	select {}
}
