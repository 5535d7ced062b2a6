// Running without the interpreter's lock.
#pragma once

#include <Python.h>

#include <chrono>
#include <thread>

namespace nanoinfer {

// Releases the interpreter's lock while it lives, as nb::gil_scoped_release does, but for one case: when the interpreter
// exits, Python (before 3.14) ends a daemon thread that asks for the lock by pthread_exit, which unwinds the stack; a
// destructor or a catch-all of C++ on the way then aborts the process. Here such a thread sleeps until the process ends.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding, which must go no further
      while (true) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace nanoinfer
