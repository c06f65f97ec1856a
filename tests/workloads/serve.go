// The program of images that have nothing else: it serves what it sees of itself until it is told to stop.
package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"syscall"
)

func main() {
	server := &http.Server{Addr: ":8080"}
	http.HandleFunc("/", func(answer http.ResponseWriter, _ *http.Request) {
		folder, err := syscall.Getwd()
		if err != nil {
			folder = err.Error()
		}
		fmt.Fprintf(answer, "user %d in %s with %d processors\n", os.Getuid(), folder, runtime.GOMAXPROCS(0))
	})
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	go func() {
		if err := server.ListenAndServe(); err != http.ErrServerClosed {
			fmt.Println(err)
			os.Exit(1)
		}
	}()
	<-stop.Done()
	if err := server.Shutdown(context.Background()); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("stopped")
}
