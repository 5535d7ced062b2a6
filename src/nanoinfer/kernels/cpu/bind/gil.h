// Running code without the interpreter lock.
#pragma once

#include <Python.h>

#include <chrono>
#include <thread>

namespace nanoinfer {

// Releases the interpreter lock for the object's lifetime, as nb::gil_scoped_release does, except at exit: before 3.14,
// Python ends a daemon thread that requests the lock by pthread_exit, which unwinds the stack; a C++ destructor or
// catch-all then aborts the process. Here, such a thread sleeps until the process ends.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // stop the unwinding here
      while (true) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace nanoinfer
