# The clang, C++ library and old glibc of the package `ziglang`, for the target in the variable ZIG_TARGET of the environment.
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "$ENV{ZIG_TARGET}")
if("$ENV{ZIG_TARGET}" MATCHES "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()
set(CMAKE_C_COMPILER $ENV{ZIG} cc -target $ENV{ZIG_TARGET})
set(CMAKE_CXX_COMPILER $ENV{ZIG} c++ -target $ENV{ZIG_TARGET})
set(CMAKE_AR "$ENV{ZIG_TOOLS}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "$ENV{ZIG_TOOLS}/ranlib" CACHE FILEPATH "")
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)  # there are none, nor clang-scan-deps
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)  # linking a program would compile a C++ library for each set of flags
set(CMAKE_CXX_COMPILER_LAUNCHER "" CACHE STRING "")
# pyconfig.h includes that of the architecture by its path from here. nanobind 3.1 uses stderr without including <cstdio>.
set(CMAKE_CXX_FLAGS_INIT "-isystem $ENV{ZIG_HEADERS} -include cstdio")
