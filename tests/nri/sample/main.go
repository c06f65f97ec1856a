// A plugin on the public Go library, in the manner of that project's own samples: it logs what it hears, and changes
// containers by annotations of their pods. What it is it learns from flags, or from its configuration when the runtime
// starts it.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

// settings come as flags or as JSON from the runtime.
type settings struct {
	Log string `json:"log"`
}

type plugin struct {
	index string
	mutex sync.Mutex
	set   settings
}

func (p *plugin) say(words ...string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	file, err := os.OpenFile(p.set.Log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	defer file.Close()
	fmt.Fprintln(file, p.index, strings.Join(words, " "))
}

func (p *plugin) Configure(_ context.Context, config, runtime, version string) (stub.EventMask, error) {
	if config != "" {
		if err := json.Unmarshal([]byte(config), &p.set); err != nil {
			return 0, err
		}
	}
	fmt.Println("configured by", runtime, version)
	p.say("Configure", runtime)
	return 0, nil
}

func (p *plugin) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	longest := 0
	for _, pod := range pods {
		for _, value := range pod.Annotations {
			longest = max(longest, len(value))
		}
	}
	p.say("Synchronize", fmt.Sprint(len(pods)), fmt.Sprint(len(containers)), fmt.Sprint(longest))
	return nil, nil
}

func (p *plugin) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	netns, open := "", "absent"
	for _, namespace := range pod.GetLinux().GetNamespaces() {
		if namespace.Type == "network" {
			netns = namespace.Path
			break
		}
	}
	if _, err := os.Stat(netns); err == nil {
		open = "there"
	}
	p.say("RunPodSandbox", pod.Name, open, strings.Join(pod.Ips, ","), fmt.Sprint(len(pod.Annotations["big"])))
	if pod.Annotations["refuse"] == p.index {
		return fmt.Errorf("this pod is refused")
	}
	return nil
}

func (p *plugin) StopPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	p.say("StopPodSandbox", pod.Name)
	return nil
}

func (p *plugin) RemovePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	p.say("RemovePodSandbox", pod.Name, strings.Join(pod.Ips, ","))
	return nil
}

// CreateContainer does what annotations of the pod ask for: `KIND/INDEX: WORDS`.
func (p *plugin) CreateContainer(_ context.Context, pod *api.PodSandbox, container *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	p.say("CreateContainer", container.Name, container.Annotations["touched"])
	adjust := &api.ContainerAdjustment{}
	for key, value := range pod.Annotations {
		kind, index, _ := strings.Cut(key, "/")
		if index != p.index {
			continue
		}
		words := strings.Fields(value)
		switch kind {
		case "touch":
			adjust.RemoveAnnotation("touched")
			adjust.AddAnnotation("touched", value)
		case "env":
			adjust.AddEnv(words[0], words[1])
		case "ulimit":
			adjust.AddRlimit(words[0], 99, 77)
		case "device":
			adjust.AddDevice(&api.LinuxDevice{Path: words[0], Type: "c", Major: 1, Minor: 5})
		case "mount":
			adjust.AddMount(&api.Mount{Destination: words[0], Type: "tmpfs", Source: "tmpfs"})
		case "hook":
			adjust.AddHooks(&api.Hooks{CreateRuntime: []*api.Hook{{
				Path: "/bin/sh", Args: []string{"sh", "-c", value},
			}}})
		}
	}
	return adjust, nil, nil
}

func (p *plugin) PostCreateContainer(_ context.Context, _ *api.PodSandbox, container *api.Container) error {
	p.say("PostCreateContainer", container.Name, container.Annotations["touched"])
	return nil
}

func (p *plugin) StartContainer(_ context.Context, _ *api.PodSandbox, container *api.Container) error {
	p.say("StartContainer", container.Name)
	return nil
}

func (p *plugin) PostStartContainer(_ context.Context, _ *api.PodSandbox, container *api.Container) error {
	p.say("PostStartContainer", container.Name)
	return nil
}

func (p *plugin) StopContainer(_ context.Context, _ *api.PodSandbox, container *api.Container) ([]*api.ContainerUpdate, error) {
	p.say("StopContainer", container.Name)
	return nil, nil
}

func (p *plugin) RemoveContainer(_ context.Context, _ *api.PodSandbox, container *api.Container) error {
	p.say("RemoveContainer", container.Name)
	return nil
}

func (p *plugin) run(options ...stub.Option) error {
	made, err := stub.New(p, options...)
	if err != nil {
		return err
	}
	return made.Run(context.Background())
}

func main() {
	var set settings
	indices := flag.String("indices", "", "two digits each; empty: as the runtime says")
	name := flag.String("name", "sample", "of the plugin")
	socket := flag.String("socket", "", "of the runtime")
	flag.StringVar(&set.Log, "log", "", "file for what it hears")
	flag.Parse()
	ended := make(chan error)
	all := []string{""}
	if *indices != "" {
		all = strings.Split(*indices, ",")
	}
	for _, index := range all {
		options := []stub.Option{}
		shown := os.Getenv("NRI_PLUGIN_IDX")
		if index != "" {
			shown = index
			options = append(options, stub.WithPluginIdx(index), stub.WithPluginName(*name), stub.WithSocketPath(*socket))
		}
		one := &plugin{index: shown, set: set}
		go func() { ended <- one.run(options...) }()
	}
	if err := <-ended; err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
