# The C++ that knows nothing of Python: the extension (CMakeLists.txt) and the tests in C++ (tests/cpp) are made of it.
set(CPU ${CMAKE_CURRENT_LIST_DIR})
find_package(Threads REQUIRED)

# make asan: every read and write checked. Slow, and never installed.
option(NANOINFER_SANITIZE "Build with AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
if(NANOINFER_SANITIZE)
  set(SANITIZE -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1)
  add_compile_options(${SANITIZE})
  add_link_options(${SANITIZE})
  set(OPTIMIZE -O1)  # checked kernels take minutes to compile at -O3
  # And with each access checked in place, by two sanitizers: here by a call, by AddressSanitizer alone.
  set(SANITIZE_KERNELS -DNANOINFER_ROLLED --param asan-instrumentation-with-call-threshold=0
    -fno-sanitize=null,alignment,object-size,pointer-overflow)
else()
  set(OPTIMIZE -O3)
endif()

set(AVX2 -mavx2 -mfma -mf16c)
set(AVX512 ${AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)

# The instruction sets of a build beside `scalar`: NANOINFER_ISA as a variable or in the environment, a list of names or
# `all`; otherwise the fastest of this machine. A build for another machine has all.
set(ISAS "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(ISAS avx2 avx2_vnni avx512 avx512_vnni)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")  # whose system call gives permission to use AMX
    list(APPEND ISAS amx)
    set(AMX NANOINFER_AMX)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(ISAS neon)
endif()
if(NOT DEFINED NANOINFER_ISA)
  set(NANOINFER_ISA "$ENV{NANOINFER_ISA}")
endif()
if(NANOINFER_ISA STREQUAL "" AND NOT CMAKE_CROSSCOMPILING)
  list(TRANSFORM AMX PREPEND -D OUTPUT_VARIABLE DEFINITIONS)
  try_run(DETECTED COMPILED ${CMAKE_BINARY_DIR}/detect_isa ${CPU}/kernels/detect_isa.cpp COMPILE_DEFINITIONS ${DEFINITIONS}
    CXX_STANDARD 20 RUN_OUTPUT_VARIABLE NANOINFER_ISA)
  if(NOT DETECTED EQUAL 0)  # no such builtins: all
    set(NANOINFER_ISA "all")
  endif()
endif()
if(NOT NANOINFER_ISA STREQUAL "all")
  foreach(name ${NANOINFER_ISA})
    if(NOT name IN_LIST ISAS AND NOT name STREQUAL "scalar")
      message(FATAL_ERROR "nanoinfer: NANOINFER_ISA=${name} is unknown: use all, or some of scalar, ${ISAS}")
    endif()
  endforeach()
  set(ISAS ${NANOINFER_ISA})
  list(REMOVE_ITEM ISAS scalar)
endif()
message(STATUS "nanoinfer: kernels for scalar ${ISAS}")

set(FLAGS_avx2 ${AVX2})
set(FLAGS_avx2_vnni ${AVX2} -mavxvnni)
set(FLAGS_avx512 ${AVX512})
set(FLAGS_avx512_vnni ${AVX512} -mavx512vnni -mavx512bf16)
set(FLAGS_amx ${FLAGS_avx512_vnni} -mamx-tile -mamx-int8 -mamx-bf16)
set(FLAGS_neon -DNANOINFER_NEON)  # every such CPU has NEON: no flag tells `neon` from `scalar`

# One kernel source, compiled once for each instruction set; isa.cpp chooses at run time. Multiplication and addition
# are fused only where the source says so: then every number of rows rounds alike.
function(add_kernels target name)
  add_library(kernels_${name} OBJECT ${CPU}/kernels/kernels.cpp)
  target_compile_definitions(kernels_${name} PRIVATE NANOINFER_ISA=${name})
  target_compile_options(kernels_${name} PRIVATE -Wall -Wextra -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized
    ${OPTIMIZE} ${SANITIZE_KERNELS} -fPIC -ffp-contract=off ${ARGN})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:kernels_${name}>)
endfunction()

# Give a target all of it.
function(add_cpu_sources target)
  set(MODEL ${CPU}/model)
  target_sources(${target} PRIVATE
    ${MODEL}/decoder.cpp ${MODEL}/forward.cpp ${MODEL}/experts.cpp ${MODEL}/latent.cpp ${MODEL}/per_layer.cpp ${MODEL}/adapters.cpp
    ${MODEL}/cache.cpp ${MODEL}/recurrent.cpp
    ${CPU}/kernels/format.cpp ${CPU}/kernels/isa.cpp ${CPU}/sampler/sampler.cpp ${CPU}/sampler/sampler_passes.cpp)
  target_include_directories(${target} PUBLIC ${CPU}/kernels ${MODEL} ${CPU}/sampler)
  # Nor in packing, where compilers for Arm fuse by default: a weight file is packed to the same bytes everywhere.
  set_source_files_properties(${CPU}/kernels/format.cpp PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
  # As nobody traps exceptions of floats, loops with conditions can be vectorized without AVX-512 too.
  set_source_files_properties(${CPU}/sampler/sampler_passes.cpp PROPERTIES COMPILE_OPTIONS -fno-trapping-math)
  target_compile_options(${target} PRIVATE -Wall -Wextra ${OPTIMIZE})
  target_link_libraries(${target} PRIVATE Threads::Threads)
  target_compile_definitions(${target} PRIVATE ${AMX})
  set(FLAGS_scalar -DNANOINFER_ROLLED)  # for other CPUs than these: unrolled, it takes minutes to compile
  foreach(name scalar ${ISAS})
    add_kernels(${target} ${name} ${FLAGS_${name}})
    string(APPEND KERNELS "NI_KERNELS(${name})")
  endforeach()
  target_compile_definitions(${target} PRIVATE "NANOINFER_KERNELS=${KERNELS}")
endfunction()
